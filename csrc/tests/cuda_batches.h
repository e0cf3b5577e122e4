// Batches for test_cuda.cpp, and one call of the CUDA kernels on the host with all that it leaves.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/convert.h"
#include "cuda/launch.h"
#include "cuda/prepare.h"
#include "simt/launch.h"

namespace m2po {

// How a tensor lies in its memory.
enum class Layout { contiguous, misaligned, every_third, transposed, framed, framed_evenly, one_a_row };

// Values of one tensor, stored in some dtype and layout in memory of exactly that size, so that AddressSanitizer sees its ends.
class Stored {
 public:
  Stored() = default;
  Stored(const std::vector<double>& values, const Grid& grid, DType dtype, Layout layout = Layout::contiguous) {
    source_.dtype = dtype;
    int64_t elements = grid.tokens(), first = 0;
    source_.row_stride = grid.columns;
    source_.column_stride = 1;
    switch (layout) {
      case Layout::contiguous:
        break;
      case Layout::misaligned:
        first = 1;
        elements += 1;
        break;
      case Layout::every_third:
        source_.row_stride *= 3;
        source_.column_stride = 3;
        elements = elements * 3 - 2;
        break;
      case Layout::transposed:
        source_.row_stride = 1;
        source_.column_stride = grid.rows;
        break;
      case Layout::framed:
        source_.row_stride = grid.columns + 3;
        first = 2;
        elements = grid.rows * source_.row_stride;
        break;
      case Layout::framed_evenly:
        source_.row_stride = (grid.columns / 16 + 1) * 16;
        elements = grid.rows * source_.row_stride;
        break;
      case Layout::one_a_row:
        source_.row_stride = 1;
        source_.column_stride = 0;
        elements = grid.rows;
        break;
    }
    const int64_t size = bytes_of(dtype);
    bytes_.assign(static_cast<size_t>(std::max<int64_t>(elements, 0) * size), 0xff);  // NaN around
    source_.data = bytes_.data() + first * size;
    for (int64_t row = 0; row < grid.rows; ++row)
      for (int64_t column = 0; column < grid.columns; ++column) {
        const int64_t at = first + row * source_.row_stride + column * source_.column_stride;
        put(bytes_.data() + at * size, dtype, values[static_cast<size_t>(row * grid.columns + column)]);
      }
  }
  Stored(Stored&&) = default;
  Stored& operator=(Stored&&) = default;

  const Source& source() const { return source_; }

 private:
  template <class T>
  static void write(uint8_t* to, T value) {
    std::memcpy(to, &value, sizeof value);
  }
  static void put(uint8_t* to, DType dtype, double value) {
    switch (dtype) {
      case DType::f32:
        return write(to, static_cast<float>(value));
      case DType::bf16:
        return write(to, float_to_bf16(static_cast<float>(value)));
      case DType::f16:
        return write(to, float_to_f16(static_cast<float>(value)));
      case DType::f64:
        return write(to, value);
      case DType::u8:
        return write(to, static_cast<uint8_t>(value));
      case DType::i16:
        return write(to, static_cast<int16_t>(value));
      case DType::i32:
        return write(to, static_cast<int32_t>(value));
      case DType::i64:
        return write(to, static_cast<int64_t>(value));
    }
  }
  std::vector<uint8_t> bytes_;
  Source source_;
};

struct Outcome {
  std::vector<uint8_t> keep;
  std::vector<float> per_token, gradient;
  float loss = 0;
  std::array<double, 2> scales{};
  std::array<int64_t, 2> cut{};
  std::array<int64_t, 7> counts{};
  std::array<double, 9> floats{};

  bool operator==(const Outcome&) const = default;
};

// Selection, loss (one or per token) and gradient (of a sum of losses, or of per-token losses with grad[i] each).
inline Outcome run_kernels(const Batch& batch, const Rule& rule, const double* denominators, bool per_token) {
  const int64_t n = batch.grid.tokens();
  Outcome out;
  const auto forward = [&](Output output, void* to, DType dtype) {
    ForwardJob job = forward_job(batch, rule);
    job.output = output;
    job.out = view_of({to, dtype, batch.grid.columns, 1}, batch.grid);
    job.denominators = denominators;
    job.denominators_stride = 1;
    job.scales = out.scales.data();
    job.cut = out.cut.data();
    job.counts = out.counts.data();
    job.floats = out.floats.data();
    const Shape shape = shape_of(job);
    job.list_room = shape.list_room;
    const int64_t bytes = lay_out(&job.work, nullptr, shape, n);
    std::vector<char> work(static_cast<size_t>(bytes), static_cast<char>(0xc5));
    lay_out(&job.work, work.data(), shape, n);
    launch(job, shape, nullptr);
  };
  out.keep.assign(static_cast<size_t>(n), 7);
  forward(Output::keep, out.keep.data(), DType::u8);
  if (per_token) {
    out.per_token.assign(static_cast<size_t>(n), 7.0f);
    forward(Output::per_token, out.per_token.data(), DType::f32);
  } else {
    forward(Output::loss, &out.loss, DType::f32);
  }
  const std::vector<float> grad(static_cast<size_t>(per_token ? n : 1), per_token ? 0.5f : 1.0f);
  out.gradient.assign(static_cast<size_t>(n), 7.0f);
  BackwardJob job = backward_job(batch, rule);
  job.per_token = per_token;
  job.grad = per_token ? view_of({grad.data(), DType::f32, batch.grid.columns, 1}, batch.grid) : View{.data = grad.data()};
  job.scales = out.scales.data();
  job.cut = out.cut.data();
  job.out = view_of({out.gradient.data(), DType::f32, batch.grid.columns, 1}, batch.grid);
  launch(job, nullptr);
  return out;
}

}  // namespace m2po
