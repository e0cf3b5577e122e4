// The exact decision: Slack against sums in wider integers, and the worked cases at its edges.
#include "core/cut.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace {

using m2po::Bin;
using m2po::Slack;
using m2po::Unit;
using m2po::Wide;

TEST(Unit, HoldsTheThresholdExactly) {
  for (const double tau : {0.04, 0.25, 0.1, 1.0, 1e-300, 5e-324, 1e300, 3.0e-39}) {
    const Unit unit = Unit::of(tau);
    EXPECT_EQ(std::ldexp(static_cast<double>(unit.mantissa), unit.exponent), tau);
    EXPECT_GE(unit.mantissa, int64_t{1} << 52);
    EXPECT_LT(unit.mantissa, int64_t{1} << 53);
    if (tau > 1e-290) {
      const double scaled = std::ldexp(tau, unit.scale_exponent);
      EXPECT_GE(scaled, 0x1p30);
      EXPECT_LT(scaled, 0x1p31);
      EXPECT_EQ(-unit.exponent - unit.scale_exponent, m2po::kSlackBits);
    }
  }
}

template <class Real>
Bin bin_of(Real v, int64_t count) {
  return {count, Wide{m2po::mantissa_of<Real>(m2po::to_bits(v))} * count};
}

TEST(Slack, PaysToTheLastUnit) {
  // Two low tokens with v = 0 pay for one of v = 3 tau, and for no more.
  const double tau = 0.25;
  const Unit unit = Unit::of(tau);
  const float three = 0.75f, above = std::nextafter(three, 1.0f);
  Slack<float> slack(unit, 2, 0);
  EXPECT_EQ(slack.affordable(m2po::to_bits(three), 5), 1);
  EXPECT_EQ(slack.affordable(m2po::to_bits(above), 5), 0);
  EXPECT_FALSE(slack.pay(bin_of(above, 1), m2po::exponent_field<float>(m2po::to_bits(above))));
  EXPECT_TRUE(slack.pay(bin_of(three, 1), m2po::exponent_field<float>(m2po::to_bits(three))));
  EXPECT_EQ(slack.affordable(m2po::to_bits(std::nextafter(0.25f, 1.0f)), 1), 0);
}

TEST(Slack, LowTokensTakeFromIt) {
  // One low token at tau leaves nothing; one at half of tau leaves half.
  const double tau = 0.5;
  const Unit unit = Unit::of(tau);
  const auto rounded = [&](double v) { return static_cast<int64_t>(std::nearbyint(std::ldexp(v, unit.scale_exponent))); };
  EXPECT_EQ(Slack<double>(unit, 1, rounded(0.5)).affordable(m2po::to_bits(0.75), 1), 0);
  EXPECT_EQ(Slack<double>(unit, 1, rounded(0.25)).affordable(m2po::to_bits(0.75), 9), 1);
}

TEST(Slack, NoValueAndNoCountOverflows) {
  const Unit unit = Unit::of(1e-30);
  const int64_t many = int64_t{1} << 31;
  for (const float v : {1e-29f, 1.0f, 3e38f, INFINITY}) {
    Slack<float> slack(unit, many, 0);
    const int field = m2po::exponent_field<float>(m2po::to_bits(v));
    const long double affordable = std::isinf(v) ? 0 : std::floor((long double)many * 1e-30L / ((long double)v - 1e-30L));
    EXPECT_EQ(slack.affordable(m2po::to_bits(v), many), static_cast<int64_t>(std::min<long double>(affordable, many))) << v;
    EXPECT_EQ(slack.pay(bin_of(v, many), field), affordable >= many) << v;
  }
}

TEST(Slack, ManyHugeCandidatesDoNotOverflow) {
  const double huge = 0x1p28 * 1.1 * 0x1p28 * 1.1;
  Slack<double> slack(Unit::of(0.04), 100, 0);
  EXPECT_FALSE(slack.pay(bin_of(huge, 16384), m2po::exponent_field<double>(m2po::to_bits(huge))));
  for (int exponent = -4; exponent < 1000; ++exponent) {
    const double v = std::ldexp(1.9, exponent);
    EXPECT_FALSE(slack.pay(bin_of(v, int64_t{1} << 31), m2po::exponent_field<double>(m2po::to_bits(v)))) << exponent;
  }
}

TEST(Slack, SubnormalThreshold) {
  // tau = 1, one low token at 1 and two at 0, in units of the smallest double: 2 can be paid for, then nothing above 2.
  const double least = 5e-324;
  Slack<double> slack(Unit::of(least), 3, int64_t{1} << 30);
  EXPECT_EQ(slack.affordable(m2po::to_bits(4 * least), 1), 0);
  EXPECT_EQ(slack.affordable(m2po::to_bits(3 * least), 9), 1);
  EXPECT_TRUE(slack.pay(bin_of(2 * least, 1), 0));
  EXPECT_FALSE(slack.pay(bin_of(3 * least, 1), 0));
}

TEST(Slack, AnInfinityIsNeverPaidFor) {
  Slack<double> slack(Unit::of(1e300), int64_t{1} << 31, 0);
  EXPECT_EQ(slack.affordable(m2po::to_bits(double{INFINITY}), 1), 0);
}

}  // namespace
