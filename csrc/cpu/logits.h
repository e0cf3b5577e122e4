// Log-probs of chosen tokens from logits, and their gradient: rows are independent, so a row's result depends on nothing else.
#pragma once

#include <cstdint>

#include "../core/types.h"
#include "driver.h"

namespace m2po {

// Something for each row (b, t): a value, or where the row starts. Strides in elements.
template <class T>
struct PerRow {
  T* data = nullptr;
  int64_t batch_stride = 0, row_stride = 0;
  int64_t place(int64_t b, int64_t t) const { return b * batch_stride + t * row_stride; }
  auto& at(int64_t b, int64_t t) const { return data[place(b, t)]; }
};

// z = softcap(scale * x) / temperature over the first `vocab` of `width` columns. Row (b, t), t < rows, goes with ids.at(b, t).
// There are rows + shift rows of logits a sequence; the last `shift` of them have no token.
struct LogitsJob {
  PerRow<const void> logits;  // columns are contiguous
  DType dtype = DType::f32;
  int64_t batches = 0, rows = 0, shift = 0, vocab = 0, width = 0;
  PerRow<const int64_t> ids;
  PerRow<const float> temperatures;  // without data: `temperature` for all
  float temperature = 1, scale = 1, softcap = 0;
};

// What flows into the backward; `entropy` and `grad_entropy` without data: no gradient through the entropy.
struct LogitsGrad {
  PerRow<const float> log_probs, grad_log_probs, entropy, grad_entropy;
};

void log_softmax(const LogitsJob& job, PerRow<float> log_probs, PerRow<float> entropy, const Parallel& parallel);

// Writes d logits; `out` has the dtype of the logits and may be the logits.
void log_softmax_backward(const LogitsJob& job, const LogitsGrad& grad, PerRow<void> out, const Parallel& parallel);

// Rows [begin, end), counted over all sequences, rows without a token among them.
using LogSoftmaxFn = void (*)(const LogitsJob&, int64_t begin, int64_t end, PerRow<float> log_probs, PerRow<float> entropy);
using LogSoftmaxBackwardFn = void (*)(const LogitsJob&, int64_t begin, int64_t end, const LogitsGrad&, PerRow<void> out);

}  // namespace m2po
