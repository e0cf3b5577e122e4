// Every 16-bit float, against the compiler's own conversions.
#define M2PO_ISA baseline
#include "core/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

namespace {

#if defined(__FLT16_MANT_DIG__)
float reference_from_f16(uint16_t bits) {
  _Float16 x;
  std::memcpy(&x, &bits, sizeof x);
  return static_cast<float>(x);
}

uint16_t reference_to_f16(float x) {
  const _Float16 y = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &y, sizeof bits);
  return bits;
}

TEST(Convert, EveryHalfToFloat) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float got = m2po::f16_to_float(static_cast<uint16_t>(bits)), want = reference_from_f16(static_cast<uint16_t>(bits));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
    } else {
      EXPECT_EQ(std::signbit(got), std::signbit(want)) << bits;
      EXPECT_EQ(got, want) << bits;
    }
  }
}

TEST(Convert, FloatToHalfRoundsToNearestEven) {
  // Each half, the midpoints to its neighbours, and a float next to each midpoint.
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const float here = reference_from_f16(static_cast<uint16_t>(bits));
    const float next = bits + 1 < 0x7c00 ? reference_from_f16(static_cast<uint16_t>(bits + 1)) : 65536.0f;
    const float middle = here + (next - here) / 2;
    for (const float x : {here, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) {
      EXPECT_EQ(m2po::float_to_f16(x), reference_to_f16(x)) << x;
      EXPECT_EQ(m2po::float_to_f16(-x), reference_to_f16(-x)) << x;
    }
  }
  EXPECT_EQ(m2po::float_to_f16(INFINITY), 0x7c00);
  EXPECT_EQ(m2po::float_to_f16(1e30f), 0x7c00);
  EXPECT_EQ(m2po::float_to_f16(NAN) & 0x7e00, 0x7e00);
}
#endif

TEST(Convert, BFloat16RoundTripsAndRoundsToNearestEven) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float x = m2po::bf16_to_float(static_cast<uint16_t>(bits));
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(m2po::bf16_to_float(m2po::float_to_bf16(x))));
    } else {
      EXPECT_EQ(m2po::float_to_bf16(x), bits);
    }
  }
  EXPECT_EQ(m2po::float_to_bf16(1.00390625f), 0x3f80);               // half way, to the even one below
  EXPECT_EQ(m2po::float_to_bf16(1.01171875f), 0x3f82);               // half way, to the even one above
  EXPECT_EQ(m2po::float_to_bf16(std::nextafter(1.00390625f, 2.0f)), 0x3f81);
}

}  // namespace
