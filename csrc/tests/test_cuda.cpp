// The CUDA kernels' own source on the host, against the CPU kernels (which test_sweep.cpp checks against a literal loop) and
// against written answers: masks, counts, cut and scales to the bit; for several grids, blocks, orders of threads and list sizes.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>

#include "cpu/driver.h"
#include "cuda_batches.h"

namespace {

using namespace m2po;
using simt::Settings;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

#if defined(__SANITIZE_ADDRESS__)
constexpr int kTrials = 200;  // five times as slow
#else
constexpr int kTrials = 1000;
#endif

class Serial final : public Parallel {
  void run(int64_t n, int64_t, Body body, void* context) const override { body(context, 0, n); }
};

const Settings kSettings[] = {
    {32, 1, 0, 0}, {32, 7, 8, 1}, {64, 3, 32, 2}, {64, 1, 1000, 0}, {128, 2, 5, 3}, {256, 2, 64, 0}, {256, 1, 0, 4},
};

Outcome run_as(const Settings& settings, const Batch& batch, const Rule& rule, const double* denominators = nullptr,
               bool per_token = false) {
  simt::settings() = settings;
  return run_kernels(batch, rule, denominators, per_token);
}

// What differs between the two is how exp rounds: within 2 ulp of fp32 each (2^-22), the CPU's quick exp - 1 - d within 3e-6.
void expect_as_cpu(const Outcome& got, Batch batch, Rule rule, const double* denominators, bool per_token) {
  const size_t n = static_cast<size_t>(batch.grid.tokens());
  std::vector<uint8_t> keep(n), mask(n);

  std::vector<float> per_token_want(n), gradient(n);
  sweep<float>(batch, rule, denominators, keep.data(), nullptr, Serial());
  const auto want = sweep<float>(batch, rule, denominators, nullptr, per_token ? per_token_want.data() : nullptr, Serial());
  ASSERT_EQ(got.keep, keep);
  EXPECT_EQ(got.counts, want.statistics.counts);
  EXPECT_EQ(got.cut, (std::array<int64_t, 2>{int64_t{to_bits(want.cut.value)}, want.cut.position}));
  EXPECT_EQ(got.scales, want.scales);
  for (size_t i = 0; i < 9; ++i) {
    const double a = got.floats[i], b = want.statistics.floats[i];
    if (std::isfinite(b)) {
      EXPECT_NEAR(a, b, (i < 2 ? 1e-12 : i < 5 || i == 8 ? 0.0 : 5e-6) * std::fabs(b)) << i;
    } else {
      EXPECT_TRUE(std::isnan(b) ? std::isnan(a) : a == b) << i;
    }
  }
  const std::vector<float> grad(n, 0.5f);
  const Source each = per_token ? Source{grad.data(), DType::f32, batch.grid.columns, 1} : Source{};
  backward<float>(batch, rule, 1.0, each, want.scales, want.cut, {gradient.data(), DType::f32, batch.grid.columns, 1}, Serial());
  double size = 0;
  for (size_t i = 0; i < n; ++i) {
    if (std::isnan(gradient[i])) {
      EXPECT_TRUE(std::isnan(got.gradient[i])) << i;
    } else if (std::isinf(gradient[i])) {
      EXPECT_EQ(got.gradient[i], gradient[i]) << i;
    } else {
      // 2 ulp in each exp, and as many again where two terms cancel: the terms are below |gradient| + kl_coef of each token here.
      EXPECT_NEAR(got.gradient[i], gradient[i], 1e-6 * (std::fabs(gradient[i]) + rule.kl_coef)) << i;
    }
    size += std::fabs(gradient[i]);
    if (per_token && std::isfinite(per_token_want[i])) {
      EXPECT_NEAR(got.per_token[i], per_token_want[i], 1e-6 * (2 * std::fabs(gradient[i]) + std::fabs(per_token_want[i]) + 1)) << i;
    }
  }
  if (!per_token && std::isfinite(want.loss)) {
    EXPECT_NEAR(got.loss, want.loss, 1e-6 * (size + std::fabs(want.loss) + rule.kl_coef));
  }
}

struct Tokens {
  Grid grid;
  std::vector<double> log_probs, behavior, advantages, mask, reference, weights, keep;
};

// A third of the tokens without advantage, a fifth not valid, few values where `ties`; in fp32 as the kernels see them.
Tokens random_tokens(int64_t rows, int64_t columns, double noise, bool ties, std::mt19937& g) {
  std::normal_distribution<double> normal;
  Tokens t;
  t.grid = {rows, columns};
  for (int64_t i = 0; i < rows * columns; ++i) {
    double d = noise * normal(g);
    if (ties) d = std::round(d * 8) / 8;
    const double old = ties ? -1.0 : -std::fabs(normal(g));
    t.behavior.push_back(old);
    t.log_probs.push_back(old + d);
    t.advantages.push_back(g() % 3 == 0 ? 0.0 : normal(g));
    t.mask.push_back(g() % 5 != 0);
    t.reference.push_back(old + d + 0.3 * normal(g));
    t.weights.push_back(1.0 / static_cast<double>(1 + g() % 9));
    t.keep.push_back(g() % 4 != 0);
  }
  return t;
}

struct Held {
  Stored log_probs, behavior, advantages, mask, reference, weights, keep;
  Batch batch;
};

Held hold(const Tokens& t, DType dtype, Layout layout, bool extras) {
  Held h;
  h.log_probs = Stored(t.log_probs, t.grid, dtype, layout);
  h.behavior = Stored(t.behavior, t.grid, dtype == DType::f16 ? DType::f32 : dtype, layout);
  h.advantages = Stored(t.advantages, t.grid, DType::f32, layout == Layout::transposed ? Layout::one_a_row : Layout::contiguous);
  h.mask = Stored(t.mask, t.grid, DType::u8, layout);
  if (extras) {
    h.reference = Stored(t.reference, t.grid, DType::bf16, layout);
    h.weights = Stored(t.weights, t.grid, DType::f32, Layout::one_a_row);
  }
  h.batch = {t.grid, h.log_probs.source(), h.behavior.source(), h.advantages.source(), h.mask.source(), h.reference.source(),
             h.weights.source(), h.keep.source()};
  return h;
}

TEST(Cuda, RandomBatchesAsTheCpuDecides) {
  std::mt19937 g(1);
  const double taus[] = {0.04, 0.0, 1e-30, 0.003, 0.5, 1e30, kInfinity};
  const Layout layouts[] = {Layout::contiguous, Layout::misaligned, Layout::every_third, Layout::transposed, Layout::framed,
                            Layout::framed_evenly};
  const DType dtypes[] = {DType::f32, DType::bf16, DType::f16};
  int64_t dropped = 0, kept_candidates = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    const int64_t rows = 1 + g() % 5, columns = trial % 50 == 0 ? 700 : trial % 4 == 0 ? 8 * (1 + g() % 10) : 1 + g() % 90;
    const double noise = std::pow(10.0, -1.5 + static_cast<double>(g() % 100) / 50);
    const Tokens t = random_tokens(rows, columns, noise, trial % 2 == 0, g);
    const Held h = hold(t, dtypes[g() % 3], layouts[g() % 6], trial % 3 == 0);
    Rule rule;
    rule.m2_threshold = taus[trial % 3 == 0 ? g() % 7 : 0];
    rule.scope_all = g() % 5 == 0;
    rule.clip = g() % 7 == 0;
    rule.ratio_cap = g() % 5 == 0 ? 1.3 : kInfinity;
    rule.kl_coef = trial % 3 == 0 ? 0.1 : 0.0;
    rule.normalizer = static_cast<Normalizer>(g() % 3);
    const double given[] = {7, 9};
    const bool per_token = g() % 4 == 0;  // divides by nothing
    if (per_token) rule.normalizer = Normalizer::one;
    const double* denominators = g() % 4 == 0 ? given : nullptr;
    const Outcome got = run_as(kSettings[trial % std::size(kSettings)], h.batch, rule, denominators, per_token);
    expect_as_cpu(got, h.batch, rule, denominators, per_token);
    if (HasFatalFailure() || HasNonfatalFailure()) FAIL() << "trial " << trial;
    dropped += got.counts[3];
    kept_candidates += got.counts[2] - got.counts[3];
  }
  EXPECT_GT(dropped, 10 * kTrials);
  EXPECT_GT(kept_candidates, kTrials);
}

TEST(Cuda, NoGridBlockOrderOrListSizeChangesAMask) {
  std::mt19937 g(2);
  for (const bool ties : {false, true}) {
    const Tokens t = random_tokens(3, 1700, 0.4, ties, g);
    const Held h = hold(t, DType::f32, Layout::contiguous, false);
    const Outcome first = run_as(kSettings[0], h.batch, {});
    EXPECT_GT(first.counts[3], 0);
    for (const Settings& settings : kSettings) {
      const Outcome got = run_as(settings, h.batch, {});
      EXPECT_EQ(got.keep, first.keep);
      EXPECT_EQ(got.cut, first.cut);
      EXPECT_EQ(got.counts, first.counts);
      EXPECT_EQ(got.gradient, first.gradient);
      // One shape gives the same bits in whatever order its threads run.
      Settings other = settings;
      for (const uint32_t order : {5u, 6u}) {
        other.order = order;
        EXPECT_EQ(run_as(other, h.batch, {}), got);
      }
    }
  }
}

TEST(Cuda, EqualsAtTheCutGoInTheOrderOfPositions) {
  Tokens t;
  t.grid = {1, 3000};
  for (int64_t i = 0; i < 3000; ++i) {
    t.log_probs.push_back(i % 3 ? 0.75 : 0.0625);
    t.behavior.push_back(0);
    t.advantages.push_back(1);
    t.mask.push_back(1);
  }
  const Held h = hold(t, DType::f32, Layout::contiguous, false);
  for (const double tau : {0.04, 0.1, 0.3, 0.37}) {
    Rule rule;
    rule.m2_threshold = tau;
    for (const Settings& settings : kSettings) expect_as_cpu(run_as(settings, h.batch, rule), h.batch, rule, nullptr, false);
  }
}

TEST(Cuda, OptionsAsTheCpuServesThem) {
  std::mt19937 g(3);
  for (int trial = 0; trial < 60; ++trial) {
    Tokens t = random_tokens(4, 150, 0.5, trial % 2, g);
    if (trial % 3 == 0) t.log_probs[static_cast<size_t>(g() % 600)] = trial % 2 ? kInfinity : std::nan("");
    Held h = hold(t, DType::f32, Layout::contiguous, trial % 4 == 0);
    if (trial % 5 == 0) {
      h.keep = Stored(t.keep, t.grid, DType::u8);
      h.batch.keep = h.keep.source();
    }
    Rule rule;
    rule.kl_coef = h.batch.ref_log_probs.data ? 0.2 : 0.0;
    rule.nonfinite = trial % 2 ? Nonfinite::drop : Nonfinite::propagate;
    expect_as_cpu(run_as(kSettings[trial % std::size(kSettings)], h.batch, rule), h.batch, rule, nullptr, false);
    if (HasFatalFailure() || HasNonfatalFailure()) FAIL() << "trial " << trial;
  }
}

TEST(Cuda, MasksOfEveryDtype) {
  std::mt19937 g(4);
  Tokens t = random_tokens(3, 70, 0.5, false, g);
  const Held h = hold(t, DType::f32, Layout::contiguous, false);
  const Outcome want = run_as({}, h.batch, {});
  for (double& x : t.mask) x = x != 0 ? -3 : -0.0;  // nonzero is valid, a negative zero is not
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i16, DType::i32, DType::i64})
    for (const Layout layout : {Layout::contiguous, Layout::every_third}) {
      const Stored mask(t.mask, t.grid, dtype, layout);
      Batch batch = h.batch;
      batch.mask = mask.source();
      EXPECT_EQ(run_as({}, batch, {}), want) << static_cast<int>(dtype);
    }
}

TEST(Cuda, AnEmptyBatchAndOneWithoutValidTokens) {
  Tokens t;
  t.grid = {0, 5};
  const Held none = hold(t, DType::f32, Layout::contiguous, false);
  const Outcome empty = run_as({}, none.batch, {});
  EXPECT_EQ(empty.counts, (std::array<int64_t, 7>{0, 0, 0, 0, 0, 0, -1}));
  EXPECT_EQ(empty.loss, 0);
  t.grid = {1, 9};
  for (auto* values : {&t.log_probs, &t.behavior, &t.advantages}) values->assign(9, std::nan(""));
  t.mask.assign(9, 0);
  const Held masked = hold(t, DType::f32, Layout::contiguous, false);
  const Outcome got = run_as({}, masked.batch, {});
  EXPECT_EQ(got.loss, 0);
  EXPECT_EQ(got.gradient, std::vector<float>(9, 0.0f));
}

struct Case {
  const char* name;
  double tau;
  std::vector<double> d, advantages, mask;
  std::vector<uint8_t> keep;
};

// docs/semantics.md, "Worked cases".
TEST(Cuda, WorkedCases) {
  const std::vector<double> ones4(4, 1);
  const Case cases[] = {
      {"T1", 0.04, {.1, .1, .1, .6, .05, .05, .05, .05, .05, .05, .05, .05}, std::vector<double>(12, 1), std::vector<double>(12, 1),
       std::vector<uint8_t>(12, 1)},
      {"T2", 0.04, {.19, .19, .19, .19, .21, .21, .21, .21}, std::vector<double>(8, 1), std::vector<double>(8, 1),
       {1, 1, 1, 1, 0, 1, 1, 1}},
      {"T3", 0.04, {1, -1, 1, -1}, {1, 1, -1, -1}, ones4, {0, 1, 1, 0}},
      {"T4", 0.25, {.5, .5}, {1, 1}, {1, 1}, {1, 1}},
      {"T5", 0.04, {1}, {1}, {1}, {0}},
      {"T6", 0.04, {1e-7, 1}, {1, 1}, {1, 1}, {1, 0}},
      {"T7", 0, {.1, .2}, {1, 1}, {1, 1}, {0, 0}},
      {"T8", 0.04, {.6, .6, .6}, {0, 1, 1}, {1, 1, 1}, {1, 0, 0}},
      {"T9", 0.04, {200, 0}, {1, 1}, {0, 1}, {0, 1}},
      {"T10", 0.04, {0, 0, 200}, {1, 1, 1}, {1, 1, 0}, {1, 1, 0}},
      {"T11", 0.1, {.31622776}, {1}, {1}, {0}},
      {"T12", 0.04, {100, .1}, {0, 1}, {1, 1}, {1, 1}},
  };
  for (const Case& c : cases)
    for (const Settings& settings : kSettings) {
      const int64_t n = static_cast<int64_t>(c.d.size());
      Tokens t{{1, n}, c.d, std::vector<double>(c.d.size(), 0), c.advantages, c.mask, {}, {}, {}};
      const Held h = hold(t, DType::f32, Layout::contiguous, false);
      Rule rule;
      rule.m2_threshold = c.tau;
      EXPECT_EQ(run_as(settings, h.batch, rule).keep, c.keep) << c.name;
    }
}

// One tensor of the recorded rollouts: its bytes, found through the header of the file (safetensors: JSON).
class Rollouts {
 public:
  Rollouts() {
    std::ifstream file(M2PO_ROLLOUTS, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    uint64_t size = 0;
    std::memcpy(&size, bytes_.data(), sizeof size);
    header_.assign(bytes_.data() + 8, size);
  }
  Source source(const std::string& name, DType dtype, int64_t row_stride, int64_t column_stride) const {
    const std::string key = "\"data_offsets\":[";
    const size_t entry = header_.find("\"" + name + "\":{"), offsets = header_.find(key, entry);
    if (entry == std::string::npos || offsets == std::string::npos) throw std::runtime_error("no " + name + " in " M2PO_ROLLOUTS);
    const char* const data = bytes_.data() + 8 + header_.size();
    return {data + std::stoull(header_.substr(offsets + key.size())), dtype, row_stride, column_stride};
  }

 private:
  std::vector<char> bytes_;
  std::string header_;
};

TEST(Cuda, RecordedRollouts) {
  const Rollouts file;
  struct Want {
    const char* name;
    int64_t region, candidates, dropped;
  };
  for (const Want& want : {Want{"log_probs_bf16_step0", 1504, 1, 0}, Want{"log_probs_step1", 1651, 215, 1},
                           Want{"log_probs_step4", 1809, 827, 425}, Want{"log_probs_step16", 2003, 1503, 1227}}) {
    const Grid grid{192, 48};
    const auto matrix = [&](const char* name, DType dtype) { return file.source(name, dtype, grid.columns, 1); };
    const Batch batch{grid, matrix(want.name, DType::f32), matrix("behavior_log_probs", DType::f32),
                      file.source("advantages", DType::f32, 1, 0), matrix("mask", DType::u8), {}, {}, {}};
    for (const Settings& settings : {kSettings[2], kSettings[4], kSettings[5]}) {
      const Outcome got = run_as(settings, batch, {});
      EXPECT_EQ(got.counts[1], want.region);
      EXPECT_EQ(got.counts[2], want.candidates);
      EXPECT_EQ(got.counts[3], want.dropped);
      expect_as_cpu(got, batch, {}, nullptr, false);
    }
  }
}

}  // namespace
