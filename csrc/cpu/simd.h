// Vectors of the ISA that this translation unit is compiled for, and the few things std::experimental::simd lacks.
#pragma once

#include <cmath>
#include <cstdint>
#include <experimental/simd>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace m2po {
inline namespace M2PO_ISA {

namespace stdx = std::experimental;

using FloatV = stdx::native_simd<float>;
using DoubleV = stdx::native_simd<double>;
using ScalarDouble = stdx::simd<double, stdx::simd_abi::scalar>;

// a * b + c, rounded once where the ISA can. Only for exp's polynomial: d, v and the sums are never contracted.
inline FloatV mul_add(FloatV a, FloatV b, FloatV c) {
#if defined(__AVX512F__)
  return FloatV(_mm512_fmadd_ps(static_cast<__m512>(a), static_cast<__m512>(b), static_cast<__m512>(c)));
#elif defined(__FMA__)
  return FloatV(_mm256_fmadd_ps(static_cast<__m256>(a), static_cast<__m256>(b), static_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

// An fp64 sum of lanes.
template <class V>
class WideSum;

template <>
class WideSum<FloatV> {
 public:
  void add(FloatV x) {
    using Half = stdx::simd<float, stdx::simd_abi::deduce_t<float, FloatV::size() / 2>>;
    const auto half = stdx::split<Half>(x);
    low_ += stdx::static_simd_cast<DoubleV>(half[0]);
    high_ += stdx::static_simd_cast<DoubleV>(half[1]);
  }
  double total() const { return stdx::reduce(low_ + high_); }

 private:
  DoubleV low_ = 0.0, high_ = 0.0;
};

template <>
class WideSum<ScalarDouble> {
 public:
  void add(ScalarDouble x) { sum_ += x[0]; }
  double total() const { return sum_; }

 private:
  double sum_ = 0.0;
};

template <class V>
struct ExpTerms {
  V ratio;      // exp(x)
  V minus_one;  // exp(x) - 1
  V excess;     // exp(x) - 1 - x
};

// exp(x) within 2 ulp for every float, subnormal results and NaN included.
inline ExpTerms<FloatV> exp_terms(FloatV x) {
  using Int = stdx::rebind_simd_t<int32_t, FloatV>;
  constexpr float kMagic = 0x1.8p23f;  // adding it rounds to an integer and leaves that integer in the low bits
  FloatV y = x;
  stdx::where(y > 89.0f, y) = 89.0f;  // a NaN stays
  stdx::where(y < -104.0f, y) = -104.0f;
  const FloatV shifted = mul_add(y, FloatV(0x1.715476p+0f), FloatV(kMagic));
  const FloatV n = shifted - kMagic;
  // ln 2 in two parts, the first with 9 trailing zero bits, so that n times it is exact.
  FloatV r = mul_add(n, FloatV(-0x1.62e4p-1f), y);
  r = mul_add(n, FloatV(-0x1.7f7d1cp-20f), r);
  // (exp(r) - 1 - r) / r^2 by its Taylor series to r^5: off by less than 8e-8 of itself for |r| <= ln 2 / 2.
  FloatV q = mul_add(r, FloatV(1.0f / 5040.0f), FloatV(1.0f / 720.0f));
  q = mul_add(q, r, FloatV(1.0f / 120.0f));
  q = mul_add(q, r, FloatV(1.0f / 24.0f));
  q = mul_add(q, r, FloatV(1.0f / 6.0f));
  q = mul_add(q, r, FloatV(0.5f));
  const FloatV square = r * r * q;
  const FloatV expm1_r = r + square;
  // 2^n as two factors: n reaches from -150 to 128.
  const Int exponent = __builtin_bit_cast(Int, shifted) - __builtin_bit_cast(int32_t, kMagic);
  const Int first = exponent >> 1;
  const FloatV a = __builtin_bit_cast(FloatV, Int((first + 127) << 23));
  const FloatV b = __builtin_bit_cast(FloatV, Int((exponent - first + 127) << 23));
  ExpTerms<FloatV> out;
  out.ratio = (expm1_r + 1.0f) * a * b;
  out.minus_one = expm1_r * a * b + (a * b - 1.0f);  // accurate near 0, where exp(x) - 1 would cancel
  stdx::where(n > 127.0f, out.minus_one) = out.ratio - 1.0f;
  out.excess = out.minus_one - x;
  stdx::where(n == 0.0f, out.excess) = square;
  return out;
}

inline ExpTerms<ScalarDouble> exp_terms(ScalarDouble x) {
  const double minus_one = std::expm1(x[0]);
  return {ScalarDouble(std::exp(x[0])), ScalarDouble(minus_one), ScalarDouble(minus_one - x[0])};
}

// Nearest integer, ties to even, of 0 <= x < 2^31.
inline FloatV round_positive(FloatV x) {
  FloatV rounded = (x + 0x1p23f) - 0x1p23f;
  stdx::where(x >= 0x1p23f, rounded) = x;
  return rounded;
}
inline ScalarDouble round_positive(ScalarDouble x) { return ScalarDouble(std::nearbyint(x[0])); }

// An exact sum of integers 0 <= x < 2^31 held in floating point.
template <class V>
class IntegerSum;

template <>
class IntegerSum<FloatV> {
 public:
  void add(FloatV x) {
    const Int i = stdx::static_simd_cast<Int>(x);
    low_ += i & 0xffff;
    high_ += i >> 16;
  }
  int64_t total() const {
    int64_t sum = 0;
    for (size_t lane = 0; lane < Int::size(); ++lane)
      sum += static_cast<int64_t>(low_[lane]) + (static_cast<int64_t>(high_[lane]) << 16);
    return sum;
  }

 private:
  using Int = stdx::rebind_simd_t<int32_t, FloatV>;  // 16-bit halves: room for 2^15 additions a block
  Int low_ = 0, high_ = 0;
};

template <>
class IntegerSum<ScalarDouble> {
 public:
  void add(ScalarDouble x) { sum_ += static_cast<int64_t>(x[0]); }
  int64_t total() const { return sum_; }

 private:
  int64_t sum_ = 0;
};

}  // namespace M2PO_ISA
}  // namespace m2po
