#include "driver.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "../core/cut.h"
#include "../core/limits.h"
#include "candidates.h"
#include "kernels.h"

namespace m2po {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Blocks below which a sweep stays on one thread: 32,768 tokens, about as long as waking another takes.
constexpr int64_t kSerialBlocks = 8;

// A block's candidates once the cut is known.
struct Settlement {
  double policy = 0, v_kept = 0, v_all = 0;
  int64_t dropped = 0;
};

struct Totals {
  double policy = 0, kl = 0, v_kept = 0, v_all = 0, ratio = 0, excess = 0, ratio_max = 0, gone_min = kInfinity;
  int64_t valid = 0, region = 0, candidates = 0, dropped = 0, kept = 0, bad = 0, clipped = 0;
  int64_t first_bad = std::numeric_limits<int64_t>::max();
};

double share(double sum, int64_t n) { return n > 0 ? sum / static_cast<double>(n) : 0.0; }

Statistics statistics_of(const Totals& t, double cut_value) {
  const int64_t first = t.bad > 0 ? t.first_bad : -1;
  return {{t.valid, t.region, t.candidates, t.dropped, t.bad, t.clipped, first},
          {share(t.v_all, t.region), share(t.v_kept, t.kept), share(static_cast<double>(t.dropped), t.valid),
           share(static_cast<double>(t.region), t.valid), std::min(cut_value, t.gone_min), share(t.ratio, t.valid), t.ratio_max,
           share(t.excess, t.valid), share(static_cast<double>(t.clipped), t.valid)}};
}

std::array<double, 2> scales_of(const Rule& rule, const double* denominators, const Totals& t) {
  if (rule.normalizer == Normalizer::one) return {1.0, 1.0};
  const double valid = static_cast<double>(t.valid);
  std::array<double, 2> n{rule.normalizer == Normalizer::kept ? valid - static_cast<double>(t.dropped) : valid, valid};
  if (denominators) n = {denominators[0], denominators[1]};
  return {n[0] != 0 ? 1 / n[0] : 0.0, n[1] != 0 ? 1 / n[1] : 0.0};
}

// Adds the kept candidates in index order, and takes the dropped ones out of the per-token outputs.
template <class Real>
Settlement settle(const Candidates<Real>& list, const Cut<Real>& cut, int64_t begin, uint8_t* keep_out, Real* loss_out) {
  Settlement s;
  for (int i = 0; i < list.count; ++i) {
    const Real v = list.v[i];
    const int64_t position = begin + list.offset[i];
    s.v_all += v;
    if (v > cut.value || (v == cut.value && position <= cut.position)) {
      ++s.dropped;
      if (keep_out) keep_out[position] = 0;
    } else {
      s.policy += list.policy[i];
      s.v_kept += v;
      if (loss_out) loss_out[position] += list.policy[i];
    }
  }
  return s;
}

}  // namespace

template <class Real>
LossResult<Real> sweep(const Batch& batch, const Rule& rule, const double* denominators, uint8_t* keep_out, Real* loss_out,
                       const Parallel& parallel) {
  const int64_t tokens = batch.grid.tokens();
  const int64_t blocks = (tokens + kBlock - 1) / kBlock;
  const Unit unit = Unit::of(rule.m2_threshold);
  const Limits<Real> limits = limits_of<Real>(rule, unit);
  const auto size_of = [&](int64_t b) { return static_cast<int>(std::min<int64_t>(kBlock, tokens - b * kBlock)); };

  std::vector<BlockSums<Real>> sums(static_cast<size_t>(blocks));
  std::vector<Candidates<Real>> lists(static_cast<size_t>(blocks));
  std::deque<Arena<Real>> arenas;
  std::mutex mutex;
  const auto kernel = [] {
    if constexpr (std::is_same_v<Real, float>) {
      return kernels().sweep_f32;
    } else {
      return kernels().sweep_f64;
    }
  }();
  parallel(blocks, kSerialBlocks, [&](int64_t begin, int64_t end) {
    Arena<Real>* arena;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      arena = &arenas.emplace_back();
    }
    for (int64_t b = begin; b < end; ++b) {
      auto& list = lists[static_cast<size_t>(b)];
      list = arena->reserve();
      kernel(batch, rule, limits, b * kBlock, size_of(b), &sums[static_cast<size_t>(b)], &list, keep_out, loss_out);
      arena->commit(list);
    }
  });

  Totals t;
  int64_t low_count = 0, low_sum = 0;
  for (const auto& s : sums) {
    low_count += s.low;
    low_sum += s.low_sum;
  }
  CutSearch<Real> search(lists, Slack<Real>(unit, low_count, low_sum), parallel);
  t.candidates = search.total();
  LossResult<Real> result;
  result.cut = search.find();

  std::vector<Settlement> settled(static_cast<size_t>(blocks));
  parallel(blocks, std::max<int64_t>(kSerialBlocks, t.candidates < kSerialCandidates ? blocks : 1), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      settled[static_cast<size_t>(b)] = settle(lists[static_cast<size_t>(b)], result.cut, b * kBlock, keep_out, loss_out);
  });

  bool nan_ratio = false;
  for (int64_t b = 0; b < blocks; ++b) {
    const auto& s = sums[static_cast<size_t>(b)];
    const auto& c = settled[static_cast<size_t>(b)];
    t.policy += s.policy + c.policy;
    t.kl += s.kl;
    t.v_kept += s.v_settled + c.v_kept;
    t.v_all += s.v_settled + s.v_gone + c.v_all;
    t.ratio += s.ratio;
    t.excess += s.excess;
    nan_ratio = nan_ratio || std::isnan(s.ratio_max);
    t.ratio_max = std::max<double>(t.ratio_max, s.ratio_max);
    t.gone_min = std::min<double>(t.gone_min, s.gone_min);
    t.valid += s.valid;
    t.region += s.region;
    t.dropped += s.gone + c.dropped;
    t.kept += s.low + lists[static_cast<size_t>(b)].count - c.dropped;
    t.bad += s.bad;
    t.clipped += s.clipped;
    t.first_bad = std::min(t.first_bad, s.first_bad);
  }
  if (nan_ratio) t.ratio_max = std::numeric_limits<double>::quiet_NaN();
  result.scales = scales_of(rule, denominators, t);
  // A scale of 0 says that there is nothing to divide by: the loss is then 0, whatever the sums hold.
  result.loss = (result.scales[0] != 0 ? t.policy * result.scales[0] : 0.0) + (result.scales[1] != 0 ? t.kl * result.scales[1] : 0.0);
  result.statistics = statistics_of(t, static_cast<double>(result.cut.value));
  return result;
}

template <class Real>
void backward(const Batch& batch, const Rule& rule, double grad_loss, const Source& per_token, const std::array<double, 2>& scales,
              const Cut<Real>& cut, const Source& out, const Parallel& parallel) {
  const int64_t tokens = batch.grid.tokens();
  const int64_t blocks = (tokens + kBlock - 1) / kBlock;
  const Limits<Real> limits = limits_of<Real>(rule, Unit::of(rule.m2_threshold));
  GradScale<Real> scale{static_cast<Real>(grad_loss * scales[0]), static_cast<Real>(rule.kl_coef * grad_loss * scales[1]), per_token};
  const auto kernel = [] {
    if constexpr (std::is_same_v<Real, float>) {
      return kernels().backward_f32;
    } else {
      return kernels().backward_f64;
    }
  }();
  const Real at_cut = std::nextafter(cut.value, Real(0));  // up to the cut's position its equals go too
  parallel(blocks, kSerialBlocks, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t begin = b * kBlock, end = std::min(begin + kBlock, tokens);
      const int64_t split = std::clamp(cut.position + 1, begin, end);
      if (split > begin) kernel(batch, rule, limits, scale, at_cut, begin, static_cast<int>(split - begin), out);
      if (end > split) kernel(batch, rule, limits, scale, cut.value, split, static_cast<int>(end - split), out);
    }
  });
}

void log_softmax(const LogitsJob& job, PerRow<float> log_probs, PerRow<float> entropy, const Parallel& parallel) {
  parallel(job.batches * (job.rows + job.shift), 1, [&](int64_t begin, int64_t end) {
    kernels().log_softmax(job, begin, end, log_probs, entropy);
  });
}

void log_softmax_backward(const LogitsJob& job, const LogitsGrad& grad, PerRow<void> out, const Parallel& parallel) {
  parallel(job.batches * (job.rows + job.shift), 1, [&](int64_t begin, int64_t end) {
    kernels().log_softmax_backward(job, begin, end, grad, out);
  });
}

void advise_huge([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: refusal changes nothing
#endif
}

template LossResult<float> sweep(const Batch&, const Rule&, const double*, uint8_t*, float*, const Parallel&);
template LossResult<double> sweep(const Batch&, const Rule&, const double*, uint8_t*, double*, const Parallel&);
template void backward(const Batch&, const Rule&, double, const Source&, const std::array<double, 2>&, const Cut<float>&,
                       const Source&, const Parallel&);
template void backward(const Batch&, const Rule&, double, const Source&, const std::array<double, 2>&, const Cut<double>&,
                       const Source&, const Parallel&);

}  // namespace m2po
