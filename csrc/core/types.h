// What a kernel is told: shapes, sources and scalars. Torch-free.
#pragma once

#include <cstdint>
#include <limits>

namespace m2po {

// Tokens in a block: the unit in which fp64 sums are made (in index order) and threads share work. Small enough for a
// block's scratch to stay in the first-level cache, and for a token's place in it to fit 16 bits.
inline constexpr int kBlock = 4096;

// The integers are for masks; those wider than a byte come to the CUDA kernels alone.
enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, f64 = 3, u8 = 4, i16 = 5, i32 = 6, i64 = 7 };

// A [rows, columns] view of any strides, in elements. data == nullptr: the argument was not given.
struct Source {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

struct Grid {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t tokens() const { return rows * columns; }
};

struct Batch {
  Grid grid;
  Source log_probs, behavior_log_probs, advantages, mask, ref_log_probs, weights, keep;
};

enum class Nonfinite : int { propagate = 0, drop = 1, error = 2 };
enum class Normalizer : int { valid = 0, kept = 1, one = 2 };

struct Rule {
  double m2_threshold = 0.04;
  bool scope_all = false;
  bool clip = false;  // PPO's clip instead of Algorithm 1
  double clip_low = 0.2;
  double clip_high = 0.2;
  double kl_coef = 0.0;
  double ratio_cap = std::numeric_limits<double>::infinity();
  Nonfinite nonfinite = Nonfinite::propagate;
  Normalizer normalizer = Normalizer::valid;
};

// The rule's bounds in the type of d, each rounded once (limits.h makes them).
template <class Real>
struct Limits {
  Real candidate_above;         // largest Real that is <= m2_threshold
  double scale, scale_rest;     // their product is 2^k: a low v times it is below 2^31; scale_rest is 1 for any k that fp32 needs
  Real log_high, log_low;       // log1p(clip_high), log1p(-clip_low)
  Real ratio_high, ratio_low;   // 1 + clip_high, 1 - clip_low
  Real log_cap, cap;
  Real kl_coef;
};

// What one block leaves behind, final but for its candidates.
template <class Real>
struct BlockSums {
  double policy, kl, v_settled, v_gone, ratio, excess;
  int64_t low_sum;  // in units of 2^-k
  int64_t first_bad;
  int32_t valid, region, low, clipped, bad, gone;
  Real ratio_max;
  Real gone_min;  // smallest v dropped by a given keep
};

// A block's candidates in index order; `offset` is the place in the block.
template <class Real>
struct Candidates {
  Real* v = nullptr;
  Real* policy = nullptr;
  uint16_t* offset = nullptr;
  int32_t count = 0;
};

// The cut on (bits of v, position): a candidate is dropped if v > value, or v == value and position <= position.
template <class Real>
struct Cut {
  Real value = std::numeric_limits<Real>::infinity();
  int64_t position = -1;
};

}  // namespace m2po
