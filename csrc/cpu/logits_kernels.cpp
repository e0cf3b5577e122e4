// Rows of logits, once per ISA like kernels.cpp and under the same rules. A row is walked in blocks that stay in the first-level
// cache: each is converted to fp32, its maximum is found, and the sums are made relative to the largest maximum so far.
#include <cmath>
#include <cstring>
#include <limits>

#include "gather.h"
#include "logits.h"
#include "simd.h"

namespace m2po {
inline namespace M2PO_ISA {

void log_softmax_rows(const LogitsJob& job, int64_t begin, int64_t end, PerRow<float> log_probs, PerRow<float> entropy);
void log_softmax_backward_rows(const LogitsJob& job, int64_t begin, int64_t end, const LogitsGrad& grad, PerRow<void> out);

namespace {

constexpr int kLanes = FloatV::size();
constexpr int kColumns = 64 * kLanes;  // 32 additions in each of two fp32 sums before they become fp64; 4 KB with AVX-512
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

M2PO_INLINE FloatV load(const float* from) { return FloatV(from, stdx::element_aligned); }

M2PO_INLINE FloatV exp_only(FloatV x) {
  const Reduced<FloatV> reduced(clamp(x, -104.0f, 89.0f));
  return VectorPowerOfTwo(reduced.shifted, reduced.n).times(reduced.expm1_r + 1.0f);
}

// softcap(scale * x) as x * factor, or cap * tanh(x * factor); then everything is times 1 / temperature.
struct Shape {
  float factor, cap, per_temperature;

  explicit Shape(const LogitsJob& job, float temperature)
      : factor(job.softcap > 0 ? job.scale / job.softcap : job.scale), cap(job.softcap), per_temperature(1 / temperature) {}
};

// tanh(x) = m / (m + 2) with m = exp(2x) - 1; at |x| >= 20 it is 1 in fp32.
M2PO_INLINE FloatV tanh_of(FloatV x) {
  const FloatV m = exp_terms(clamp(x, -20.0f, 20.0f) * 2.0f).minus_one;
  return m / (m + 2.0f);
}

// Columns [first, first + count) of a row as capped logits in fp32, then copies of `pad` up to a whole vector.
M2PO_INLINE void read_block(const void* row, DType dtype, const Shape& shape, int64_t first, int count, float pad, float* to) {
  switch (dtype) {
    case DType::f32:
      std::memcpy(to, static_cast<const float*>(row) + first, static_cast<size_t>(count) * sizeof(float));
      break;
    case DType::bf16: {
      const auto* from = static_cast<const uint16_t*>(row) + first;
      for (int i = 0; i < count; ++i) to[i] = bf16_to_float(from[i]);
      break;
    }
    default: {
      const auto* from = static_cast<const uint16_t*>(row) + first;
      for (int i = 0; i < count; ++i) to[i] = f16_to_float(from[i]);
      break;
    }
  }
  // Up to a whole vector: what lies behind `count` in `to` is overwritten below.
  if (shape.cap > 0) {
    for (int i = 0; i < count; i += kLanes) (tanh_of(load(to + i) * shape.factor) * shape.cap).copy_to(to + i, stdx::element_aligned);
  } else if (shape.factor != 1) {
    for (int i = 0; i < count; i += kLanes) (load(to + i) * shape.factor).copy_to(to + i, stdx::element_aligned);
  }
  for (int i = count; i < (count + kLanes - 1) / kLanes * kLanes; ++i) to[i] = pad;
}

// Sum over all columns but one maximal of exp(z - max), and of exp(z - max) (z - max).
struct RowSums {
  float max = -kInfinity;
  double rest = 0, products = 0;

  // The sums relative to a larger maximum; the column that was left out comes in.
  void rebase(float larger, float per_temperature) {
    const double gap = (static_cast<double>(max) - larger) * per_temperature;
    const double factor = std::isinf(max) ? 0.0 : std::exp(gap);
    products = std::isinf(max) ? 0.0 : factor * (products + (rest + 1) * gap);
    rest = std::isinf(max) ? 0.0 : (rest + 1) * factor;
    max = larger;
  }
};

template <bool kEntropy>
M2PO_INLINE void add_block(const float* z, int count, float per_temperature, RowSums* row) {
  FloatV top_a = -kInfinity, top_b = -kInfinity;
  int i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    top_a = stdx::max(load(z + i), top_a);
    top_b = stdx::max(load(z + i + kLanes), top_b);
  }
  for (; i < count; i += kLanes) top_a = stdx::max(load(z + i), top_a);
  const float top = stdx::hmax(stdx::max(top_a, top_b));
  bool fresh = false;  // this block holds the column that is left out
  if (top > row->max) {
    row->rebase(top, per_temperature);
    fresh = true;
  }
  const FloatV max = row->max;
  FloatV sum_a = 0, sum_b = 0, products_a = 0, equals = 0;
  const auto add = [&](int at, FloatV& sum) __attribute__((always_inline)) {
    const FloatV below = (load(z + at) - max) * per_temperature;
    FloatV e = exp_only(below);
    if constexpr (kEntropy) {
      FloatV product = e * below;
      stdx::where(e == 0.0f, product) = 0.0f;  // 0 times minus infinity
      products_a += product;
    }
    const auto equal = below == 0.0f;
    stdx::where(equal, equals) += 1.0f;
    stdx::where(equal, e) = 0.0f;
    sum += e;
  };
  i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    add(i, sum_a);
    add(i + kLanes, sum_b);
  }
  for (; i < count; i += kLanes) add(i, sum_a);
  WideSum<FloatV> sum, products;
  sum.add(sum_a);
  sum.add(sum_b);
  products.add(products_a);
  row->rest += sum.total() + (static_cast<double>(stdx::reduce(equals)) - (fresh ? 1 : 0));
  row->products += products.total();
}

template <bool kEntropy>
void forward_row(const LogitsJob& job, const void* row, int64_t id, float temperature, float* log_prob, float* entropy) {
  alignas(64) float z[kColumns];
  const Shape shape(job, temperature);
  RowSums sums;
  float chosen = 0;
  for (int64_t first = 0; first < job.vocab; first += kColumns) {
    const int count = static_cast<int>(std::min<int64_t>(kColumns, job.vocab - first));
    read_block(row, job.dtype, shape, first, count, -kInfinity, z);
    if (id >= first && id < first + count) chosen = z[id - first];
    add_block<kEntropy>(z, count, shape.per_temperature, &sums);
  }
  const double log_rest = std::log1p(sums.rest);
  const double below = (static_cast<double>(chosen) - sums.max) * shape.per_temperature;
  *log_prob = static_cast<float>(below - log_rest);
  if constexpr (kEntropy) *entropy = static_cast<float>(log_rest - sums.products / (1 + sums.rest));
}

void write_block(void* row, DType dtype, int64_t first, int count, const float* from) {
  switch (dtype) {
    case DType::f32:
      std::memcpy(static_cast<float*>(row) + first, from, static_cast<size_t>(count) * sizeof(float));
      break;
    case DType::bf16: {
      auto* to = static_cast<uint16_t*>(row) + first;
      for (int i = 0; i < count; ++i) to[i] = float_to_bf16(from[i]);
      break;
    }
    default: {
      auto* to = static_cast<uint16_t*>(row) + first;
      for (int i = 0; i < count; ++i) to[i] = float_to_f16(from[i]);
      break;
    }
  }
}

struct RowGrad {
  float log_prob, grad, entropy, grad_entropy;
};

template <bool kEntropy, bool kCap>
void backward_row(const LogitsJob& job, const void* row, int64_t id, float temperature, const RowGrad& g, void* out) {
  alignas(64) float z[kColumns];
  const Shape shape(job, temperature);
  read_block(row, job.dtype, shape, id, 1, 0.0f, z);
  const float chosen = z[0];
  const float step = kCap ? job.scale * shape.per_temperature : shape.factor * shape.per_temperature;  // dz / dx, but for the cap
  const float minus_grad = -g.grad * step, minus_entropy = -g.grad_entropy * step;
  for (int64_t first = 0; first < job.vocab; first += kColumns) {
    const int count = static_cast<int>(std::min<int64_t>(kColumns, job.vocab - first));
    read_block(row, job.dtype, shape, first, count, 0.0f, z);
    for (int i = 0; i < count; i += kLanes) {
      const FloatV own = load(z + i);
      const FloatV log_p = (own - chosen) * shape.per_temperature + g.log_prob;
      const FloatV p = exp_only(log_p);
      FloatV d = p * minus_grad;
      if constexpr (kEntropy) {
        FloatV pull = p * (log_p + g.entropy) * minus_entropy;
        stdx::where(p == 0.0f, pull) = 0.0f;  // 0 times minus infinity
        d += pull;
      }
      if constexpr (kCap) {
        const FloatV t = own / shape.cap;
        d *= 1.0f - t * t;
      }
      d.copy_to(z + i, stdx::element_aligned);
    }
    if (id >= first && id < first + count) {
      const float p = std::exp(g.log_prob);
      float d = -std::expm1(g.log_prob) * g.grad * step;
      if (kEntropy && p > 0) d += p * (g.log_prob + g.entropy) * minus_entropy;
      if (kCap) d *= 1 - chosen / shape.cap * (chosen / shape.cap);
      z[id - first] = d;
    }
    write_block(out, job.dtype, first, count, z);
  }
}

const void* row_of(const PerRow<const void>& rows, DType dtype, int64_t b, int64_t t) {
  return static_cast<const char*>(rows.data) + rows.place(b, t) * size_of(dtype);
}

float temperature_of(const LogitsJob& job, int64_t b, int64_t t) {
  return job.temperatures.data ? job.temperatures.at(b, t) : job.temperature;
}

}  // namespace

void log_softmax_rows(const LogitsJob& job, int64_t begin, int64_t end, PerRow<float> log_probs, PerRow<float> entropy) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / (job.rows + job.shift), t = i % (job.rows + job.shift);
    if (t >= job.rows) continue;
    const void* row = row_of(job.logits, job.dtype, b, t);
    const int64_t id = job.ids.at(b, t);
    const float temperature = temperature_of(job, b, t);
    if (entropy.data) {
      forward_row<true>(job, row, id, temperature, &log_probs.at(b, t), &entropy.at(b, t));
    } else {
      forward_row<false>(job, row, id, temperature, &log_probs.at(b, t), nullptr);
    }
  }
}

void log_softmax_backward_rows(const LogitsJob& job, int64_t begin, int64_t end, const LogitsGrad& grad, PerRow<void> out) {
  const int64_t bytes = size_of(job.dtype);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / (job.rows + job.shift), t = i % (job.rows + job.shift);
    char* to = static_cast<char*>(out.data) + out.place(b, t) * bytes;
    RowGrad g{};
    if (t < job.rows) {
      g.log_prob = grad.log_probs.at(b, t);
      g.grad = grad.grad_log_probs.at(b, t);
      if (grad.grad_entropy.data) {
        g.entropy = grad.entropy.at(b, t);
        g.grad_entropy = grad.grad_entropy.at(b, t);
      }
    }
    if (g.grad == 0 && g.grad_entropy == 0) {  // written without being read
      std::memset(to, 0, static_cast<size_t>(job.width * bytes));
      continue;
    }
    const void* row = row_of(job.logits, job.dtype, b, t);
    const auto run = g.grad_entropy != 0 ? (job.softcap > 0 ? backward_row<true, true> : backward_row<true, false>)
                                         : (job.softcap > 0 ? backward_row<false, true> : backward_row<false, false>);
    run(job, row, job.ids.at(b, t), temperature_of(job, b, t), g, to);
    std::memset(to + job.vocab * bytes, 0, static_cast<size_t>((job.width - job.vocab) * bytes));
  }
}

}  // namespace M2PO_ISA
}  // namespace m2po
