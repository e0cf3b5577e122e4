// exp, exp - 1 and exp - 1 - x in fp32, for a vector of any width: `V` is a vector of the CPU kernels or a single float.
//
// What a vector type brings along, found through its namespace or beside it: mul_add(a, b, c), rounded once where the machine
// can; choose(condition, a, b); clamp(x, low, high), which leaves a NaN. `PowerOfTwo` multiplies by 2^n (power_of_two.h, simd.h).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace m2po {
inline namespace M2PO_ISA {

template <class V>
struct ExpTerms {
  V ratio;      // exp(x)
  V minus_one;  // exp(x) - 1
  V excess;     // exp(x) - 1 - x
};

inline constexpr float kRounder = 0x1.8p23f;  // adding it rounds to an integer and leaves that integer in the low bits

// exp(x) = (1 + expm1_r) 2^n with |r| <= ln 2 / 2; square = exp(r) - 1 - r.
template <class V>
struct Reduced {
  V shifted, n, square, expm1_r;

  M2PO_SHARED explicit Reduced(V x) {
    shifted = mul_add(x, V(0x1.715476p+0f), V(kRounder));
    n = shifted - V(kRounder);
    // ln 2 in two parts, the first with 9 trailing zero bits, so that n times it is exact.
    V r = mul_add(n, V(-0x1.62e4p-1f), x);
    r = mul_add(n, V(-0x1.7f7d1cp-20f), r);
    // (exp(r) - 1 - r) / r^2 by its Taylor series to r^5: off by less than 8e-8 of itself.
    V q = mul_add(r, V(1.0f / 5040.0f), V(1.0f / 720.0f));
    q = mul_add(q, r, V(1.0f / 120.0f));
    q = mul_add(q, r, V(1.0f / 24.0f));
    q = mul_add(q, r, V(1.0f / 6.0f));
    q = mul_add(q, r, V(0.5f));
    square = r * r * q;
    expm1_r = r + square;
  }
};

// exp(x) within 2 ulp for every float, subnormal results and NaN included.
template <class PowerOfTwo, class V>
M2PO_SHARED ExpTerms<V> exp_terms_by(V x) {
  const Reduced<V> reduced(clamp(x, -104.0f, 89.0f));
  const PowerOfTwo power(reduced.shifted, reduced.n);
  ExpTerms<V> out;
  out.ratio = power.times(reduced.expm1_r + V(1.0f));
  const V minus_one = power.times(reduced.expm1_r) + (power.times(V(1.0f)) - V(1.0f));  // near 0 exp(x) - 1 would cancel
  // 2^128 is no float, and the 1 is far below an ulp.
  out.minus_one = choose(reduced.n > V(127.0f), out.ratio, minus_one);
  out.excess = choose(reduced.n == V(0.0f), reduced.square, out.minus_one - x);
  return out;
}

}  // namespace M2PO_ISA
}  // namespace m2po
