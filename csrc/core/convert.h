// 16-bit floats to fp32 and back, in integer arithmetic that any compiler vectorises. Round to nearest even.
// Included by one translation unit per ISA: everything lives in that unit's own namespace (see kernels.cpp).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace m2po {
inline namespace M2PO_ISA {

M2PO_SHARED float bf16_to_float(uint16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }

M2PO_SHARED uint16_t float_to_bf16(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

// The exponent is moved by multiplying with 2^112, which also normalises subnormals; infinities and NaNs are mended.
M2PO_SHARED float f16_to_float(uint16_t x) {
  const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
  const float moved = __builtin_bit_cast(float, magnitude) * 0x1p112f;
  const uint32_t special = magnitude >= (0x7c00u << 13) ? (magnitude | 0x7f800000u) : __builtin_bit_cast(uint32_t, moved);
  return __builtin_bit_cast(float, special | (static_cast<uint32_t>(x & 0x8000u) << 16));
}

M2PO_SHARED uint16_t float_to_f16(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Subnormal result: adding 0.5 leaves the rounded value in the low bits of the sum's mantissa.
  const uint32_t small = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t half = magnitude < (113u << 23) ? small : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to infinity
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<uint16_t>(half | sign);
}

}  // namespace M2PO_ISA
}  // namespace m2po
