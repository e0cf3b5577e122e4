// From exact integer sums to the cut. Torch-free; nothing here depends on the order in which tokens were read.
//
// tau = mantissa * 2^exponent with a 53-bit mantissa, so in units of 2^exponent tau is an integer and so is every candidate
// (v > tau). Low tokens were rounded to 2^(exponent + 22). The kept candidates are the longest run, ascending by (v, latest
// position first), whose excess over tau the low tokens' slack pays for; the excess of every candidate is positive.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "types.h"

namespace m2po {

using Wide = __int128;

inline constexpr int kSlackBits = 22;

struct Unit {
  int64_t mantissa = 0;
  int exponent = 0;
  int scale_exponent = 0;  // k: a low v is rounded to a multiple of 2^-k; tau * 2^k is in [2^30, 2^31)

  static Unit of(double tau) {
    Unit unit;
    if (tau == 0 || std::isinf(tau)) return unit;
    int e = 0;
    const double fraction = std::frexp(tau, &e);
    unit.mantissa = static_cast<int64_t>(std::ldexp(fraction, 53));
    unit.exponent = e - 53;
    unit.scale_exponent = 31 - e;
    return unit;
  }
};

template <class Real>
struct Bits;
template <>
struct Bits<float> {
  using Int = uint32_t;
  static constexpr int kMantissa = 23, kBias = 150;
};
template <>
struct Bits<double> {
  using Int = uint64_t;
  static constexpr int kMantissa = 52, kBias = 1075;
};

template <class Real>
inline typename Bits<Real>::Int to_bits(Real v) {
  typename Bits<Real>::Int bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}

template <class Real>
inline Real from_bits(typename Bits<Real>::Int bits) {
  Real v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// The exponent field, and the mantissa with its hidden bit: v = mantissa * 2^(max(field, 1) - bias).
template <class Real>
inline int exponent_field(typename Bits<Real>::Int bits) {
  return static_cast<int>(bits >> Bits<Real>::kMantissa);
}
template <class Real>
inline int64_t mantissa_of(typename Bits<Real>::Int bits) {
  using Int = typename Bits<Real>::Int;
  const Int fraction = bits & ((Int{1} << Bits<Real>::kMantissa) - 1);
  return static_cast<int64_t>(fraction | (exponent_field<Real>(bits) ? Int{1} << Bits<Real>::kMantissa : 0));
}

// Candidates of one exponent, or of a narrower range of bits within it.
struct Bin {
  int64_t count = 0;
  Wide mantissas = 0;
};

template <class Real>
class Slack {
 public:
  Slack(const Unit& unit, int64_t low_count, int64_t low_sum)
      : unit_(unit), left_(Wide{low_count} * unit.mantissa - (Wide{low_sum} << kSlackBits)) {}

  // Pays for all of `bin` (its members share the exponent field) and says whether that could be done; else changes nothing.
  bool pay(const Bin& bin, int exponent) {
    if (bin.count == 0) return true;
    if (unit_.mantissa == 0) return false;  // tau = 0: no candidate can stay
    const int shift = shift_of(exponent);
    if (exceeds_any_slack(bin.mantissas, shift)) return false;
    const Wide cost = (bin.mantissas << shift) - Wide{bin.count} * unit_.mantissa;
    if (cost > left_) return false;
    left_ -= cost;
    return true;
  }

  // How many of `count` candidates of the one value with these bits can be paid for.
  int64_t affordable(typename Bits<Real>::Int bits, int64_t count) const {
    if (unit_.mantissa == 0) return 0;
    const int shift = shift_of(exponent_field<Real>(bits));
    const Wide mantissa = mantissa_of<Real>(bits);
    if (exceeds_any_slack(mantissa, shift) || left_ < 0) return 0;
    const Wide cost = (mantissa << shift) - unit_.mantissa;
    return cost <= 0 ? count : static_cast<int64_t>(std::min<Wide>(count, left_ / cost));
  }

 private:
  // Slack, and tau times any number of candidates, are below 2^31 tokens * 2^53.
  static bool exceeds_any_slack(Wide mantissas, int shift) { return shift > 86 || mantissas > (Wide{1} << 86 >> shift); }

  // Infinity is beyond all.
  int shift_of(int exponent) const {
    constexpr int top = (1 << (sizeof(Real) * 8 - 1 - Bits<Real>::kMantissa)) - 1;
    return exponent >= top ? 87 : std::max(exponent, 1) - Bits<Real>::kBias - unit_.exponent;
  }

  Unit unit_;
  Wide left_;
};

}  // namespace m2po
