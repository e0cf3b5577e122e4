// Vectors of the ISA that this translation unit is compiled for, and the few things std::experimental::simd lacks.
#pragma once

#include <cmath>
#include <cstdint>
#include <experimental/simd>
#include <utility>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "../core/host_device.h"
#include "../core/types.h"

#define M2PO_INLINE M2PO_SHARED

namespace m2po {
inline namespace M2PO_ISA {

namespace stdx = std::experimental;

using FloatV = stdx::native_simd<float>;
using DoubleV = stdx::native_simd<double>;
using ScalarDouble = stdx::simd<double, stdx::simd_abi::scalar>;

// a * b + c, rounded once where the ISA can. Only for exp's polynomial: d, v and the sums are never contracted.
M2PO_INLINE FloatV mul_add(FloatV a, FloatV b, FloatV c) {
#if defined(__AVX512F__)
  return FloatV(_mm512_fmadd_ps(static_cast<__m512>(a), static_cast<__m512>(b), static_cast<__m512>(c)));
#elif defined(__FMA__)
  return FloatV(_mm256_fmadd_ps(static_cast<__m256>(a), static_cast<__m256>(b), static_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

template <class V>
M2PO_INLINE V choose(typename V::mask_type condition, V a, V b) {
  stdx::where(condition, b) = a;
  return b;
}

template <class V>
M2PO_INLINE V absolute(V x) {
  return stdx::abs(x);
}

// x, its sign turned where y has one.
M2PO_INLINE FloatV flip_sign(FloatV x, FloatV y) {
  using Int = stdx::rebind_simd_t<uint32_t, FloatV>;
  return __builtin_bit_cast(FloatV, Int(__builtin_bit_cast(Int, x) ^ (__builtin_bit_cast(Int, y) & 0x80000000u)));
}
M2PO_INLINE ScalarDouble flip_sign(ScalarDouble x, ScalarDouble y) { return ScalarDouble(std::signbit(y[0]) ? -x[0] : x[0]); }

// x brought into [low, high]; a NaN stays.
M2PO_INLINE FloatV clamp(FloatV x, float low, float high) {
#if defined(__AVX512F__)
  const __m512 top = _mm512_min_ps(_mm512_set1_ps(high), static_cast<__m512>(x));  // the second operand where either is NaN
  return FloatV(_mm512_max_ps(_mm512_set1_ps(low), top));
#elif defined(__AVX2__)
  const __m256 top = _mm256_min_ps(_mm256_set1_ps(high), static_cast<__m256>(x));
  return FloatV(_mm256_max_ps(_mm256_set1_ps(low), top));
#else
  stdx::where(x > high, x) = high;
  stdx::where(x < low, x) = low;
  return x;
#endif
}
M2PO_INLINE ScalarDouble clamp(ScalarDouble x, float, float) { return x; }  // std::exp needs none

}  // namespace M2PO_ISA
}  // namespace m2po

#include "../core/exp.h"  // the templates find what stands above
#include "../core/token.h"

namespace m2po {
inline namespace M2PO_ISA {

// fp64 sums of lanes, and of lanes rounded to multiples of 2^-k (ties to even), the latter exact.
template <class V>
class WideSum;

// 2^52 + x, for 0 <= x < 2^31, rounds x to an integer and holds it in the low bits of its representation; so a sum of
// representations modulo 2^64 is the exact sum of the integers, once the bits of 2^52 are taken off as often as they came in.
inline constexpr double kIntegerBase = 0x1p52;

template <>
class WideSum<FloatV> {
 public:
  M2PO_INLINE void add(FloatV x) {
    low_ += lower(x);
    high_ += upper(x);
  }
  M2PO_INLINE void add_rounded(FloatV x, const Limits<float>& limits) {
    const DoubleV low = lower(x), high = upper(x);
    low_ += low;
    high_ += high;
    // The product with a power of two is exact.
    low_bits_ += __builtin_bit_cast(Int, DoubleV(low * limits.scale + kIntegerBase));
    high_bits_ += __builtin_bit_cast(Int, DoubleV(high * limits.scale + kIntegerBase));
    ++additions_;
  }
  M2PO_INLINE double total() const {
    const DoubleV sum = low_ + high_;
    double total = 0;
    for (int lane = 0; lane < kHalf; ++lane) total += sum[lane];
    return total;
  }
  M2PO_INLINE int64_t rounded_total() const {
    const Int sum = low_bits_ + high_bits_;
    uint64_t total = 0;
    for (int lane = 0; lane < kHalf; ++lane) total += sum[lane];
    return static_cast<int64_t>(total - additions_ * FloatV::size() * __builtin_bit_cast(uint64_t, kIntegerBase));
  }

 private:
  static constexpr int kHalf = static_cast<int>(FloatV::size()) / 2;
  using HalfV = stdx::simd<float, stdx::simd_abi::deduce_t<float, kHalf>>;
  using Raw [[gnu::vector_size(sizeof(FloatV))]] = float;
  using Int = stdx::rebind_simd_t<uint64_t, DoubleV>;

  M2PO_INLINE static DoubleV lower(FloatV x) { return widen<0>(x, std::make_integer_sequence<int, kHalf>()); }
  M2PO_INLINE static DoubleV upper(FloatV x) { return widen<kHalf>(x, std::make_integer_sequence<int, kHalf>()); }

  // The halves are taken with the compiler's own shuffle: simd's split() is not always inlined.
  template <int kFirst, int... kLane>
  M2PO_INLINE static DoubleV widen(FloatV x, std::integer_sequence<int, kLane...>) {
    const auto raw = __builtin_bit_cast(Raw, x);
    return stdx::static_simd_cast<DoubleV>(__builtin_bit_cast(HalfV, __builtin_shufflevector(raw, raw, (kFirst + kLane)...)));
  }

  DoubleV low_ = 0.0, high_ = 0.0;
  Int low_bits_ = 0, high_bits_ = 0;
  uint64_t additions_ = 0;
};

template <>
class WideSum<ScalarDouble> {
 public:
  M2PO_INLINE void add(ScalarDouble x) { sum_ += x[0]; }
  M2PO_INLINE void add_rounded(ScalarDouble x, const Limits<double>& limits) {
    sum_ += x[0];
    rounded_ += static_cast<int64_t>((x[0] * limits.scale * limits.scale_rest + kIntegerBase) - kIntegerBase);
  }
  M2PO_INLINE double total() const { return sum_; }
  M2PO_INLINE int64_t rounded_total() const { return rounded_; }

 private:
  double sum_ = 0.0;
  int64_t rounded_ = 0;
};

// x * 2^n for integers n in [-151, 129], held in a float (`n`) and in the low bits of n + kRounder.
class VectorPowerOfTwo {
 public:
  M2PO_INLINE VectorPowerOfTwo([[maybe_unused]] FloatV shifted, FloatV n) : n_(n) {
#if !defined(__AVX512F__)
    // Two factors, as 2^n itself may not be a normal float.
    using Int = stdx::rebind_simd_t<int32_t, FloatV>;
    const Int exponent = __builtin_bit_cast(Int, shifted) - __builtin_bit_cast(int32_t, kRounder);
    const Int first = exponent >> 1;
    a_ = __builtin_bit_cast(FloatV, Int((first + 127) << 23));
    b_ = __builtin_bit_cast(FloatV, Int((exponent - first + 127) << 23));
#endif
  }

  M2PO_INLINE FloatV times(FloatV x) const {
#if defined(__AVX512F__)
    return FloatV(_mm512_scalef_ps(static_cast<__m512>(x), static_cast<__m512>(n_)));
#else
    return x * a_ * b_;
#endif
  }

 private:
  FloatV n_, a_, b_;
};

M2PO_INLINE ExpTerms<FloatV> exp_terms(FloatV x) { return exp_terms_by<VectorPowerOfTwo>(x); }

// The same ratio in fewer steps, for the metrics: `excess` is off by up to 3e-6 of itself where it does not come from the
// polynomial (|x| > 0.35), and minus_one is not set. `reach`: x, or clamp(x, -104, 89) unless |x| < kSmall is known.
inline constexpr float kSmall = 64.0f;
M2PO_INLINE ExpTerms<FloatV> exp_terms_quick(FloatV x, FloatV reach) {
  const Reduced<FloatV> reduced(reach);
  ExpTerms<FloatV> out;
  out.ratio = VectorPowerOfTwo(reduced.shifted, reduced.n).times(reduced.expm1_r + 1.0f);
  out.excess = (out.ratio - 1.0f) - x;
  stdx::where(reduced.n == 0.0f, out.excess) = reduced.square;
  return out;
}

M2PO_INLINE ExpTerms<ScalarDouble> exp_terms(ScalarDouble x) {
  const double minus_one = std::expm1(x[0]);
  return {ScalarDouble(std::exp(x[0])), ScalarDouble(minus_one), ScalarDouble(minus_one - x[0])};
}
M2PO_INLINE ExpTerms<ScalarDouble> exp_terms_quick(ScalarDouble x, ScalarDouble) { return exp_terms(x); }

// Which of the next V::size() bytes are not 0.
template <class V>
typename V::mask_type load_mask(const uint8_t* bytes);

template <>
M2PO_INLINE FloatV::mask_type load_mask<FloatV>(const uint8_t* bytes) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return FloatV::mask_type::__from_bitset(_mm_test_epi8_mask(raw, raw));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  return FloatV(_mm256_cvtepi32_ps(wide)) != FloatV(0);
#else
  using Bytes [[gnu::vector_size(sizeof(FloatV) / 4)]] = uint8_t;
  using Floats [[gnu::vector_size(sizeof(FloatV))]] = float;
  Bytes raw;
  __builtin_memcpy(&raw, bytes, sizeof raw);
  return __builtin_bit_cast(FloatV, __builtin_convertvector(raw, Floats)) != FloatV(0);
#endif
}

template <>
M2PO_INLINE ScalarDouble::mask_type load_mask<ScalarDouble>(const uint8_t* bytes) {
  return ScalarDouble::mask_type(*bytes != 0);
}

}  // namespace M2PO_ISA
}  // namespace m2po
