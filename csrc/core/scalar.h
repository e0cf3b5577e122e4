// A single float as the vector type of exp.h and token.h: what a thread of a GPU computes with.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace m2po {
inline namespace M2PO_ISA {

M2PO_SHARED uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
M2PO_SHARED float bits_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

M2PO_SHARED float mul_add(float a, float b, float c) { return fmaf(a, b, c); }
M2PO_SHARED float choose(bool condition, float a, float b) { return condition ? a : b; }
M2PO_SHARED float absolute(float x) { return fabsf(x); }
M2PO_SHARED float flip_sign(float x, float y) { return bits_float(float_bits(x) ^ (float_bits(y) & 0x80000000u)); }
M2PO_SHARED float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

}  // namespace M2PO_ISA
}  // namespace m2po

#include "exp.h"  // the templates find what stands above
#include "token.h"

namespace m2po {
inline namespace M2PO_ISA {

// x * 2^n for integers n in [-151, 129]: two factors, as 2^n itself may not be a normal float.
class PowerOfTwo {
 public:
  M2PO_SHARED PowerOfTwo(float shifted, float) {
    const int32_t exponent = static_cast<int32_t>(float_bits(shifted) - float_bits(kRounder));
    const int32_t first = exponent >> 1;
    a_ = bits_float(static_cast<uint32_t>(first + 127) << 23);
    b_ = bits_float(static_cast<uint32_t>(exponent - first + 127) << 23);
  }
  M2PO_SHARED float times(float x) const { return x * a_ * b_; }

 private:
  float a_, b_;
};

M2PO_SHARED ExpTerms<float> exp_terms(float x) { return exp_terms_by<PowerOfTwo>(x); }

}  // namespace M2PO_ISA
}  // namespace m2po
