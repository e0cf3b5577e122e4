// Sweep and backward, for each instruction set of this machine, against a literal loop in long double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cpu/driver.h"
#include "cpu/isa.h"

namespace {

using namespace m2po;

class Serial final : public Parallel {
  void run(int64_t n, int64_t, Body body, void* context) const override { body(context, 0, n); }
};
class Chopped final : public Parallel {  // as many ranges as there are blocks, the last first
  void run(int64_t n, int64_t, Body body, void* context) const override {
    for (int64_t i = n; i-- > 0;) body(context, i, i + 1);
  }
};

template <class Real>
struct Tokens {
  std::vector<Real> log_probs, behavior, advantages;
  std::vector<uint8_t> mask;

  Tokens(int64_t n, double noise, int values, uint32_t seed) : log_probs(n), behavior(n), advantages(n), mask(n) {
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < n; ++i) {
      const double d = noise * normal(generator);
      behavior[i] = static_cast<Real>(-std::fabs(normal(generator)));
      // `values` > 0: few distinct d, so that ties stand at the cut
      log_probs[i] = values ? static_cast<Real>(std::round(d * values) / values) : static_cast<Real>(behavior[i] + d);
      if (values) behavior[i] = 0;
      advantages[i] = static_cast<Real>(generator() % 5 == 0 ? 0.0 : normal(generator));
      mask[i] = generator() % 10 != 0;
    }
  }

  Batch batch() const {
    constexpr DType own = sizeof(Real) == 4 ? DType::f32 : DType::f64;
    const int64_t n = static_cast<int64_t>(mask.size());
    return {{1, n}, {log_probs.data(), own, n, 1}, {behavior.data(), own, n, 1}, {advantages.data(), own, n, 1},
            {mask.data(), DType::u8, n, 1}, {}, {}, {}};
  }
};

template <class Real>
std::vector<uint8_t> literal(const Tokens<Real>& t, double tau) {
  std::vector<uint8_t> keep = t.mask;
  std::vector<std::pair<Real, int64_t>> region;
  for (size_t i = 0; i < keep.size(); ++i) {
    const Real d = t.log_probs[i] - t.behavior[i], a = t.advantages[i];
    if (keep[i] && ((a > 0 && d > 0) || (a < 0 && d < 0))) region.emplace_back(d * d, -static_cast<int64_t>(i));
  }
  std::sort(region.begin(), region.end());
  long double sum = 0;
  for (const auto& [v, i] : region) sum += v;
  while (!region.empty() && sum > static_cast<long double>(tau) * region.size()) {
    keep[static_cast<size_t>(-region.back().second)] = 0;
    sum -= region.back().first;
    region.pop_back();
  }
  return keep;
}

template <class Real>
void check(const Tokens<Real>& t, double tau) {
  const Batch batch = t.batch();
  const int64_t n = batch.grid.tokens();
  Rule rule;
  rule.m2_threshold = tau;
  const auto want = literal(t, tau);
  const int64_t count = std::accumulate(t.mask.begin(), t.mask.end(), int64_t{0});
  const int64_t valid = std::max<int64_t>(count, 1);  // every term is 0 where none is valid
  std::vector<uint8_t> keep(n, 9);
  std::vector<Real> gradient(n, Real(7));
  const auto result = sweep<Real>(batch, rule, nullptr, keep.data(), nullptr, Serial());
  EXPECT_EQ(keep, want);
  std::vector<uint8_t> chopped(n, 9);
  const auto again = sweep<Real>(batch, rule, nullptr, chopped.data(), nullptr, Chopped());
  EXPECT_EQ(chopped, keep);
  EXPECT_EQ(result.statistics.counts[0], count);
  EXPECT_EQ(again.loss, result.loss);
  EXPECT_EQ(again.statistics.floats, result.statistics.floats);
  backward<Real>(batch, rule, 1.0, {}, result.scales, result.cut, {gradient.data(), sizeof(Real) == 4 ? DType::f32 : DType::f64, n, 1},
                 Serial());
  long double loss = 0, size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Real d = t.log_probs[i] - t.behavior[i];
    const long double l = want[i] ? -std::exp(static_cast<long double>(d)) * t.advantages[i] : 0.0L;
    loss += l;
    size += std::fabs(l);
    EXPECT_NEAR(gradient[i], static_cast<double>(l / valid), 1e-6 * static_cast<double>(std::fabs(l) / valid)) << i;
  }
  // exp within 2 ulp (2^-22) and a product (2^-24) per fp32 term.
  EXPECT_NEAR(result.loss, static_cast<double>(loss / valid), 3e-7 * static_cast<double>(size / valid));
}

class EachIsa : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(use_isa(GetParam())); }
  void TearDown() override { use_isa(usable_isas().front()); }
};

TEST_P(EachIsa, MatchesTheLiteralLoop) {
  uint32_t seed = 0;
  for (const int64_t n : {1, 15, 16, 17, 4095, 4096, 4097, 20000})
    for (const double noise : {0.05, 0.3, 2.0})
      for (const int values : {0, 8}) {
        check(Tokens<float>(n, noise, values, ++seed), 0.04);
        check(Tokens<double>(n, noise, values, ++seed), 0.04);
      }
}

TEST_P(EachIsa, ThresholdsAtTheirEnds) {
  for (const double tau : {0.0, 1e-30, 1.0, 1e30, std::numeric_limits<double>::infinity()})
    check(Tokens<float>(5000, 1.0, 8, 99), tau);
}

TEST_P(EachIsa, AllEqualCandidates) {
  Tokens<float> t(9000, 0.0, 0, 5);
  for (size_t i = 0; i < t.mask.size(); ++i) {
    t.log_probs[i] = i % 3 ? 0.75f : 0.0625f;
    t.behavior[i] = 0;
    t.advantages[i] = 1;
    t.mask[i] = 1;
  }
  check(t, 0.04);
  check(t, 0.3);
}

INSTANTIATE_TEST_SUITE_P(Cpu, EachIsa, testing::ValuesIn(usable_isas()), [](const auto& info) { return info.param; });

}  // namespace
