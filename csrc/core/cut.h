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

#include "host_device.h"
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
M2PO_SHARED typename Bits<Real>::Int to_bits(Real v) {
  return __builtin_bit_cast(typename Bits<Real>::Int, v);
}

template <class Real>
M2PO_SHARED Real from_bits(typename Bits<Real>::Int bits) {
  return __builtin_bit_cast(Real, bits);
}

// The exponent field, and the mantissa with its hidden bit: v = mantissa * 2^(max(field, 1) - bias).
template <class Real>
M2PO_SHARED int exponent_field(typename Bits<Real>::Int bits) {
  return static_cast<int>(bits >> Bits<Real>::kMantissa);
}
template <class Real>
M2PO_SHARED int64_t mantissa_of(typename Bits<Real>::Int bits) {
  using Int = typename Bits<Real>::Int;
  const Int fraction = bits & ((Int{1} << Bits<Real>::kMantissa) - 1);
  return static_cast<int64_t>(fraction | (exponent_field<Real>(bits) ? Int{1} << Bits<Real>::kMantissa : 0));
}

// Candidates of one exponent, or of a narrower range of bits within it.
struct Bin {
  int64_t count = 0;
  Wide mantissas = 0;
};

// More than any slack: that, and tau times any number of candidates, stay below 2^31 tokens * 2^53 = 2^84. 2^31 of these add up
// to less than 2^127.
inline constexpr Wide kUnpayable = Wide{1} << 90;

// sum(v) - count * tau of the candidates in `bin`, which share the exponent field, in units of the decision. What no slack can
// pay for costs kUnpayable: infinity, and any candidate at tau = 0.
template <class Real>
M2PO_SHARED Wide cost_of(const Unit& unit, const Bin& bin, int exponent) {
  constexpr int top = (1 << (sizeof(Real) * 8 - 1 - Bits<Real>::kMantissa)) - 1;
  if (bin.count == 0) return 0;
  const int shift = (exponent > 1 ? exponent : 1) - Bits<Real>::kBias - unit.exponent;
  if (exponent >= top || unit.mantissa == 0 || shift > 86 || bin.mantissas > (Wide{1} << 86 >> shift)) return kUnpayable;
  return (bin.mantissas << shift) - Wide{bin.count} * unit.mantissa;
}

// What `low_count` low tokens, whose rounded v add up to low_sum, can pay for.
M2PO_SHARED Wide slack_of(const Unit& unit, int64_t low_count, int64_t low_sum) {
  return Wide{low_count} * unit.mantissa - (Wide{low_sum} << kSlackBits);
}

// How many of `count` candidates that cost `cost` each can be paid for: by halving, as 128-bit division is a call on a GPU.
M2PO_SHARED int64_t affordable_of(Wide left, Wide cost, int64_t count) {
  int64_t paid = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const int64_t more = paid + (int64_t{1} << bit);
    if (more <= count && cost * more <= left) paid = more;
  }
  return paid;
}

template <class Real>
class Slack {
 public:
  Slack(const Unit& unit, int64_t low_count, int64_t low_sum) : unit_(unit), left_(slack_of(unit, low_count, low_sum)) {}

  // Pays for all of `bin` (its members share the exponent field) and says whether that could be done; else changes nothing.
  bool pay(const Bin& bin, int exponent) {
    const Wide cost = cost_of<Real>(unit_, bin, exponent);
    if (bin.count > 0 && cost > left_) return false;
    left_ -= cost;
    return true;
  }

  // How many of `count` candidates of the one value with these bits can be paid for.
  int64_t affordable(typename Bits<Real>::Int bits, int64_t count) const {
    return affordable_of(left_, cost_of<Real>(unit_, {1, mantissa_of<Real>(bits)}, exponent_field<Real>(bits)), count);
  }

 private:
  Unit unit_;
  Wide left_;
};

}  // namespace m2po
