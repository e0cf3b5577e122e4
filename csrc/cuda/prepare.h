// From a batch and a rule, as all C++ backends take them, to what the CUDA kernels are told. On the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../core/limits.h"
#include "job.h"

namespace m2po {

inline int64_t bytes_of(DType dtype) {
  constexpr int64_t bytes[] = {4, 2, 2, 8, 1, 2, 4, 8};
  return bytes[static_cast<int>(dtype)];
}

inline View view_of(const Source& source, const Grid& grid) {
  View view;
  view.data = source.data;
  view.row_stride = source.row_stride;
  view.column_stride = source.column_stride;
  view.dtype = source.dtype;
  const bool one_run = source.row_stride == grid.columns || grid.rows == 1;
  const bool even_rows = grid.columns % kPerLane == 0 && source.row_stride * bytes_of(source.dtype) % 16 == 0;
  view.wide = source.column_stride == 1 && (one_run || even_rows) && reinterpret_cast<uintptr_t>(source.data) % 16 == 0;
  return view;
}

inline Inputs inputs_of(const Batch& batch) {
  const Grid& grid = batch.grid;
  Inputs in;
  in.log_probs = view_of(batch.log_probs, grid);
  in.behavior = view_of(batch.behavior_log_probs, grid);
  in.advantages = view_of(batch.advantages, grid);
  in.mask = view_of(batch.mask, grid);
  in.reference = view_of(batch.ref_log_probs, grid);
  in.weights = view_of(batch.weights, grid);
  in.keep = view_of(batch.keep, grid);
  in.tokens = static_cast<uint32_t>(grid.tokens());
  in.columns = static_cast<uint32_t>(std::max<int64_t>(grid.columns, 1));
  return in;
}

inline Options options_of(const Rule& rule) {
  Options options;
  options.scope_all = rule.scope_all;
  options.clip = rule.clip;
  options.drop_bad = rule.nonfinite == Nonfinite::drop;
  options.limits = limits_of<float>(rule, Unit::of(rule.m2_threshold));
  return options;
}

// All but the outputs, the denominators and the workspace.
inline ForwardJob forward_job(const Batch& batch, const Rule& rule) {
  ForwardJob job;
  job.in = inputs_of(batch);
  job.options = options_of(rule);
  job.unit = Unit::of(rule.m2_threshold);
  if (job.unit.mantissa != 0) {
    // Two factors, as their product may leave the range of fp32. Beyond 2^250 a low v is 0, and the product of larger ones would
    // not be.
    const int k = std::clamp(job.unit.scale_exponent, -250, 250);
    job.low_scale[0] = std::ldexp(1.0f, k / 2);
    job.low_scale[1] = std::ldexp(1.0f, k - k / 2);
  }
  job.normalizer = rule.normalizer;
  return job;
}

inline BackwardJob backward_job(const Batch& batch, const Rule& rule) {
  BackwardJob job;
  job.in = inputs_of(batch);
  job.options = options_of(rule);
  return job;
}

// Algorithm 1 over the quadrants, with no option that adds a term, an input or an output: the kernels that most calls take have
// nothing but that.
inline bool is_plain(const Inputs& in, const Options& options) {
  return !in.reference.data && !in.weights.data && !in.keep.data && !options.scope_all && !options.clip &&
         options.limits.log_cap == std::numeric_limits<float>::infinity();
}
inline bool is_plain(const ForwardJob& job) { return is_plain(job.in, job.options) && job.output != Output::per_token; }
inline bool is_plain(const BackwardJob& job) { return is_plain(job.in, job.options); }

}  // namespace m2po
