// Log-probs from logits and their gradient, for each instruction set of this machine, against long double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "cpu/isa.h"
#include "cpu/logits.h"

namespace {

using namespace m2po;

class Serial final : public Parallel {
  void run(int64_t n, int64_t, Body body, void* context) const override { body(context, 0, n); }
};

struct Options {
  float temperature = 1, scale = 1, softcap = 0;
};

class EachIsaLogits : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(use_isa(GetParam())); }
  void TearDown() override { use_isa(usable_isas().front()); }
};

// One row; columns from `vocab` on hold NaN, which must not be read.
void check(std::vector<float> row, int64_t vocab, int64_t id, const Options& o) {
  const int64_t width = static_cast<int64_t>(row.size());
  std::fill(row.begin() + vocab, row.end(), NAN);
  float log_prob = 7, entropy = 7;
  const float grad = -1.5f, grad_entropy = 0.5f;
  LogitsJob job;
  job.logits = {row.data(), width, width};
  job.batches = job.rows = 1;
  job.vocab = vocab;
  job.width = width;
  job.ids = {&id, 1, 1};
  job.temperature = o.temperature;
  job.scale = o.scale;
  job.softcap = o.softcap;
  log_softmax(job, {&log_prob, 1, 1}, {&entropy, 1, 1}, Serial());

  std::vector<long double> z(vocab), slope(vocab);
  for (int64_t j = 0; j < vocab; ++j) {
    const long double t = o.softcap ? std::tanh((long double)o.scale * row[j] / o.softcap) : 0;
    z[j] = (o.softcap ? o.softcap * t : (long double)o.scale * row[j]) / o.temperature;
    slope[j] = (o.softcap ? 1 - t * t : 1) * o.scale / o.temperature;
  }
  const long double top = *std::max_element(z.begin(), z.end());
  long double sum = 0, want_entropy = 0;
  for (const long double x : z) sum += std::exp(x - top);
  const long double log_sum = top + std::log(sum);
  for (const long double x : z)
    if (std::isfinite(x)) want_entropy -= std::exp(x - log_sum) * (x - log_sum);
  // exp and the lanes' sums are within about 2^-20 of each term, a scaled logit within 2^-23 of itself.
  const double reach = std::max(1.0, std::fabs(static_cast<double>(z[id] - top)));
  EXPECT_NEAR(log_prob, static_cast<double>(z[id] - log_sum), 1e-6 * reach);
  EXPECT_NEAR(entropy, static_cast<double>(want_entropy), 4e-6 * std::max(1.0, static_cast<double>(want_entropy)));

  log_softmax_backward(job, {{&log_prob, 1, 1}, {&grad, 1, 1}, {&entropy, 1, 1}, {&grad_entropy, 1, 1}},
                       {row.data(), width, width}, Serial());
  for (int64_t j = 0; j < vocab; ++j) {
    const long double log_p = z[j] - log_sum, p = std::exp(log_p);
    long double want = grad * ((j == id) - p);
    if (p > 0) want -= grad_entropy * p * (log_p + want_entropy);
    EXPECT_NEAR(row[j], static_cast<double>(want * slope[j]), 6e-6 * reach * std::fabs(static_cast<double>(slope[j])) + 1e-7) << j;
  }
  for (int64_t j = vocab; j < width; ++j) EXPECT_EQ(row[j], 0.0f);
}

TEST_P(EachIsaLogits, RandomRows) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  for (const int64_t vocab : {1, 5, 16, 257, 1023, 1024, 1025, 5000})
    for (const Options& o : {Options{}, Options{0.6f, 1, 0}, Options{1, -2, 0}, Options{0.8f, 2, 5}}) {
      std::vector<float> row(vocab + 3);
      for (float& x : row) x = 4 * normal(generator);
      check(row, vocab, static_cast<int64_t>(generator() % vocab), o);
    }
}

TEST_P(EachIsaLogits, MinusInfinityAndEqualMaxima) {
  std::vector<float> row(3000, -INFINITY);
  row[2500] = row[10] = 2;
  row[2999] = 1;
  check(row, 3000, 2500, {});
  check(std::vector<float>(2500, -50.0f), 2500, 0, {});
}

TEST_P(EachIsaLogits, AConfidentTokenKeepsItsLossAndGradient) {
  std::vector<float> row(32000, 0.0f);
  row[0] = 25;
  float log_prob = 0;
  const int64_t id = 0;
  const float grad = 1;
  LogitsJob job;
  job.logits = {row.data(), 32000, 32000};
  job.batches = job.rows = 1;
  job.vocab = job.width = 32000;
  job.ids = {&id, 1, 1};
  log_softmax(job, {&log_prob, 1, 1}, {}, Serial());
  const double want = -std::log1p(31999 * std::exp(-25.0));
  EXPECT_NEAR(log_prob, want, 1e-6 * -want);
  log_softmax_backward(job, {{&log_prob, 1, 1}, {&grad, 1, 1}, {}, {}}, {row.data(), 32000, 32000}, Serial());
  EXPECT_NEAR(row[0], -std::expm1(want), 1e-6 * -want);
}

TEST_P(EachIsaLogits, ARowWithoutGradientIsNotRead) {
  std::vector<float> row(100, NAN);
  const float log_prob = -1, grad = 0;
  const int64_t id = 3;
  LogitsJob job;
  job.logits = {row.data(), 100, 100};
  job.batches = job.rows = 1;
  job.vocab = job.width = 100;
  job.ids = {&id, 1, 1};
  log_softmax_backward(job, {{&log_prob, 1, 1}, {&grad, 1, 1}, {}, {}}, {row.data(), 100, 100}, Serial());
  for (const float x : row) EXPECT_EQ(x, 0.0f);
}

INSTANTIATE_TEST_SUITE_P(Cpu, EachIsaLogits, testing::ValuesIn(usable_isas()), [](const auto& info) { return info.param; });

}  // namespace
