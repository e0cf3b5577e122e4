// Tensors of any layout and dtype to the registers of a lane and back. A lane has kPerLane consecutive tokens.
//
// Reading has two steps: all loads of a tile are issued before the first value is looked at, or each tensor would wait for the
// one before.
#pragma once

#include "../core/convert.h"
#include "../core/scalar.h"
#include "job.h"
#include "platform.cuh"

namespace m2po {
namespace gpu {

struct Place {
  uint32_t start;  // position of the lane's first token
  int count;       // of its tokens that exist
  uint32_t row, column;
  uint32_t columns;

  M2PO_DEVICE Place(uint32_t position, const Inputs& in) : start(position), columns(in.columns) {
    const int64_t left = static_cast<int64_t>(in.tokens) - position;
    count = left < 0 ? 0 : left < kPerLane ? static_cast<int>(left) : kPerLane;
    row = position / columns;
    column = position - row * columns;
  }
  M2PO_DEVICE bool full() const { return count == kPerLane; }
  // Of the lane's first token in a tensor whose columns lie side by side, in elements.
  M2PO_DEVICE int64_t offset(const View& view) const { return row * view.row_stride + column; }
};

template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  T x[kCount];
};

// Values as they came: fp32 in a word each, 16-bit types two in a word.
struct Raw {
  uint32_t word[kPerLane];
};

// Calls f(k, pointer) for each of the lane's tokens that exist.
template <class T, class F>
M2PO_DEVICE void for_each_element(const View& view, const Place& at, F f) {
  T* const data = static_cast<T*>(const_cast<void*>(view.data));
  uint32_t row = at.row, column = at.column;
  T* p = data + (row * view.row_stride + column * view.column_stride);
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    if (k >= at.count) continue;
    f(k, p);
    if (++column == at.columns) {
      column = 0;
      ++row;
      p = data + row * view.row_stride;
    } else {
      p += view.column_stride;
    }
  }
}

M2PO_DEVICE Raw load(const View& view, const Place& at) {
  Raw raw = {};
  switch (view.dtype) {
    case DType::f32:
      if (view.wide && at.full()) {
        const auto pack = *reinterpret_cast<const Pack<uint32_t, kPerLane>*>(static_cast<const uint32_t*>(view.data) + at.offset(view));
#pragma unroll
        for (int k = 0; k < kPerLane; ++k) raw.word[k] = pack.x[k];
      } else {
        for_each_element<const uint32_t>(view, at, [&](int k, const uint32_t* p) { raw.word[k] = *p; });
      }
      break;
    case DType::f64:
      for_each_element<const double>(view, at, [&](int k, const double* p) { raw.word[k] = float_bits(static_cast<float>(*p)); });
      break;
    default:
      if (view.wide && at.full()) {
        const auto* from = static_cast<const uint16_t*>(view.data) + at.offset(view);
        const auto pack = *reinterpret_cast<const Pack<uint32_t, kPerLane / 2>*>(from);
#pragma unroll
        for (int k = 0; k < kPerLane / 2; ++k) raw.word[k] = pack.x[k];
      } else {
        for_each_element<const uint16_t>(
            view, at, [&](int k, const uint16_t* p) { raw.word[k / 2] |= static_cast<uint32_t>(*p) << (16 * (k % 2)); });
      }
      break;
  }
  return raw;
}

M2PO_DEVICE void decode(const View& view, const Raw& raw, float (&to)[kPerLane]) {
  if (view.dtype == DType::f32 || view.dtype == DType::f64) {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) to[k] = bits_float(raw.word[k]);
    return;
  }
  const bool is_f16 = view.dtype == DType::f16;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const uint16_t half = static_cast<uint16_t>(raw.word[k / 2] >> (16 * (k % 2)));
    to[k] = is_f16 ? f16_to_float(half) : bf16_to_float(half);
  }
}

template <class T>
M2PO_DEVICE uint32_t flags_of(const View& view, const Place& at, int ignored_bits) {
  uint32_t flags = 0;
  for_each_element<const T>(
      view, at, [&](int k, const T* p) { flags |= static_cast<uint32_t>(static_cast<T>(*p << ignored_bits) != 0) << k; });
  return flags;
}

// Bit k: whether token k of the lane is there and not zero.
M2PO_DEVICE uint32_t load_flags(const View& view, const Place& at) {
  constexpr int kSign = 1;  // a negative zero is zero
  switch (view.dtype) {
    case DType::u8: {
      if (!view.wide || !at.full()) return flags_of<uint8_t>(view, at, 0);
      const auto pack = *reinterpret_cast<const Pack<uint32_t, 2>*>(static_cast<const uint8_t*>(view.data) + at.offset(view));
      uint32_t flags = 0;
#pragma unroll
      for (int k = 0; k < kPerLane; ++k)
        flags |= static_cast<uint32_t>((pack.x[k / 4] >> (8 * (k % 4)) & 0xffu) != 0) << k;
      return flags;
    }
    case DType::bf16:
    case DType::f16:
      return flags_of<uint16_t>(view, at, kSign);
    case DType::i16:
      return flags_of<uint16_t>(view, at, 0);
    case DType::f32:
      return flags_of<uint32_t>(view, at, kSign);
    case DType::i32:
      return flags_of<uint32_t>(view, at, 0);
    case DType::f64:
      return flags_of<uint64_t>(view, at, kSign);
    default:
      return flags_of<uint64_t>(view, at, 0);
  }
}

M2PO_DEVICE void store(const View& view, const Place& at, const float (&values)[kPerLane]) {
  if (view.dtype == DType::f32) {
    if (view.wide && at.full()) {
      Pack<float, kPerLane> pack;
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) pack.x[k] = values[k];
      *reinterpret_cast<Pack<float, kPerLane>*>(static_cast<float*>(const_cast<void*>(view.data)) + at.offset(view)) = pack;
    } else {
      for_each_element<float>(view, at, [&](int k, float* p) { *p = values[k]; });
    }
    return;
  }
  Pack<uint16_t, kPerLane> pack;
  const bool is_f16 = view.dtype == DType::f16;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) pack.x[k] = is_f16 ? float_to_f16(values[k]) : float_to_bf16(values[k]);
  if (view.wide && at.full()) {
    *reinterpret_cast<Pack<uint16_t, kPerLane>*>(static_cast<uint16_t*>(const_cast<void*>(view.data)) + at.offset(view)) = pack;
  } else {
    for_each_element<uint16_t>(view, at, [&](int k, uint16_t* p) { *p = pack.x[k]; });
  }
}

M2PO_DEVICE void store_flags(const View& view, const Place& at, uint32_t flags) {
  uint8_t* const to = static_cast<uint8_t*>(const_cast<void*>(view.data)) + at.start;
  if (view.wide && at.full()) {
    Pack<uint32_t, 2> pack = {};
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) pack.x[k / 4] |= (flags >> k & 1u) << (8 * (k % 4));
    *reinterpret_cast<Pack<uint32_t, 2>*>(to) = pack;
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k)
      if (k < at.count) to[k] = static_cast<uint8_t>(flags >> k & 1u);
  }
}

// One tile of a warp: the inputs of each token of a lane. Tokens that do not exist are not valid.
template <bool kPlain>
struct Tile {
  float log_probs[kPerLane], behavior[kPerLane], advantages[kPerLane];
  float reference[kPlain ? 1 : kPerLane], weights[kPlain ? 1 : kPerLane];
  uint32_t valid, kept;

  M2PO_DEVICE Tile(const Inputs& in, const Place& at) {
    const Raw current = load(in.log_probs, at), old = load(in.behavior, at), advantage = load(in.advantages, at);
    if constexpr (!kPlain) {
      Raw other = {}, weight = {};
      if (in.reference.data) other = load(in.reference, at);
      if (in.weights.data) weight = load(in.weights, at);
      kept = in.keep.data ? load_flags(in.keep, at) : 0xffu;
      decode(in.reference, other, reference);
      decode(in.weights, weight, weights);
    }
    valid = load_flags(in.mask, at);
    decode(in.log_probs, current, log_probs);
    decode(in.behavior, old, behavior);
    decode(in.advantages, advantage, advantages);
  }
};

}  // namespace gpu
}  // namespace m2po
