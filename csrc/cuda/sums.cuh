// Sums over a warp, a block and the grid: each a fixed tree, so that fp64 sums are the same in every run of one shape.
#pragma once

#include "../core/scalar.h"
#include "list.cuh"

namespace m2po {
namespace gpu {

template <class T>
M2PO_DEVICE T warp_total(T x) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x += from_across(x, lanes);
  return x;
}
template <>
M2PO_DEVICE Wide warp_total(Wide x) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const uint64_t low = from_across(static_cast<unsigned long long>(x), lanes);
    const uint64_t high = from_across(static_cast<unsigned long long>(x >> 64), lanes);
    x += static_cast<Wide>((static_cast<unsigned __int128>(high) << 64) | low);
  }
  return x;
}

M2PO_DEVICE uint64_t to_word(double x) { return __builtin_bit_cast(uint64_t, x); }
M2PO_DEVICE double to_double(uint64_t word) { return __builtin_bit_cast(double, word); }

// A cost in two parts that are added up without a carry.
M2PO_DEVICE unsigned long long low_part(Wide cost) {
  return static_cast<unsigned long long>(cost) & ((1ull << kCostBits) - 1);
}
M2PO_DEVICE unsigned long long high_part(Wide cost) { return static_cast<unsigned long long>(cost >> kCostBits); }
M2PO_DEVICE Wide joined(uint64_t low, uint64_t high) { return (static_cast<Wide>(high) << kCostBits) + static_cast<Wide>(low); }

M2PO_DEVICE uint64_t neutral(int kind) { return kind == kFirstBad || kind == kGoneMin ? ~uint64_t{0} : 0; }

M2PO_DEVICE uint64_t combine(int kind, uint64_t a, uint64_t b) {
  if (kind >= kPolicy) return to_word(to_double(a) + to_double(b));
  if (kind == kRatioMax) return a > b ? a : b;
  if (kind == kFirstBad || kind == kGoneMin) return a < b ? a : b;
  return a + b;
}

// What a block holds in shared memory beside the lists of candidates.
template <int kThreads>
struct Shared {
  static constexpr int kWarps = kThreads / kWarp;
  uint64_t partial[kKinds][kWarps];
  uint64_t total[kKinds];
  typename BlockScan<unsigned long long, kThreads>::TempStorage scan[2];
  Wide slack;           // before the bin that was found
  int64_t members;      // of that bin
  int bin;
  uint32_t equals_before;      // in the blocks before this one
  uint32_t equals[kWarps];
  uint32_t count[kFirstBins], low[kFirstBins], high[kFirstBins];  // sum of mantissas = high * 2^32 + low
};

template <int kThreads>
M2PO_DEVICE void put_partial(Shared<kThreads>& shared, int kind, uint64_t word) {
  if (lane_index() == 0) shared.partial[kind][warp_index()] = word;
}

// The partial sums of kinds [first, last) of all warps into the block's slots. All threads take part.
template <int kThreads>
M2PO_DEVICE void publish(Shared<kThreads>& shared, const Workspace& work, int first, int last) {
  sync_block();
  for (int kind = first + thread(); kind < last; kind += kThreads) {
    uint64_t sum = shared.partial[kind][0];
    for (int warp = 1; warp < Shared<kThreads>::kWarps; ++warp) sum = combine(kind, sum, shared.partial[kind][warp]);
    work.slots[kind * blocks() + block()] = sum;
  }
}

// The totals of kinds [first, last) over all blocks into shared.total. All threads take part.
template <int kThreads>
M2PO_DEVICE void gather(Shared<kThreads>& shared, const Workspace& work, int first, int last) {
  for (int kind = first + warp_index(); kind < last; kind += Shared<kThreads>::kWarps) {
    uint64_t sum = neutral(kind);
    for (int b = lane_index(); b < blocks(); b += kWarp) sum = combine(kind, sum, work.slots[kind * blocks() + b]);
#pragma unroll
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2)
      sum = combine(kind, sum, from_across(static_cast<unsigned long long>(sum), lanes));
    if (lane_index() == 0) shared.total[kind] = sum;
  }
  sync_block();
}

}  // namespace gpu
}  // namespace m2po
