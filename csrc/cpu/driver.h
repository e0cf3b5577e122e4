// The CPU backend: one sweep over the tokens, then only candidates; and the backward. Torch-free: threads come from a callback.
#pragma once

#include <array>
#include <cstdint>

#include "../core/types.h"

namespace m2po {

// Runs body(begin, end) over a partition of [0, n) into ranges of at least `grain`, in parallel or not.
class Parallel {
 public:
  virtual ~Parallel() = default;
  using Body = void (*)(void* context, int64_t begin, int64_t end);
  virtual void run(int64_t n, int64_t grain, Body body, void* context) const = 0;

  template <class F>
  void operator()(int64_t n, int64_t grain, F&& f) const {
    if (n > 0) run(n, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<F*>(context))(begin, end); }, &f);
  }
};

// The order of m2po_kernels.results.COUNTS and FLOATS.
struct Statistics {
  std::array<int64_t, 7> counts;
  std::array<double, 9> floats;
};

template <class Real>
struct LossResult {
  double loss = 0;
  std::array<double, 2> scales{};
  Cut<Real> cut;
  Statistics statistics{};
};

// keep_out: 0/1 per token, or null. loss_out: one loss per token, or null. denominators: two numbers, or null: counted here.
template <class Real>
LossResult<Real> sweep(const Batch& batch, const Rule& rule, const double* denominators, uint8_t* keep_out, Real* loss_out,
                       const Parallel& parallel);

// per_token: grad_output for each token (reduction "none"), or without data; else grad_loss holds for all.
template <class Real>
void backward(const Batch& batch, const Rule& rule, double grad_loss, const Source& per_token, const std::array<double, 2>& scales,
              const Cut<Real>& cut, const Source& out, const Parallel& parallel);

// Asks for huge pages on a fresh, untouched output: one fault for 2 MB instead of 512.
void advise_huge(void* data, int64_t bytes);

}  // namespace m2po
