// The names of csrc/cuda/platform.cuh on the host: threads are fibers (fibers.h), and the rest follows from barriers and exchanges.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "fibers.h"

#define M2PO_DEVICE inline
#define M2PO_KERNEL(threads, blocks_per_multiprocessor) void
#define M2PO_ARGUMENT(type) const type

namespace m2po {
namespace gpu {

using simt::block;
using simt::blocks;
using simt::shared_memory;
using simt::sync_block;
using simt::sync_grid;
using simt::sync_warp;
using simt::thread;
using Where = simt::Place;

inline constexpr int kLanes = 32;

template <class T>
T from_lane(T x, int lane, Where where = Where::current()) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &x, sizeof x);
  std::memcpy(&x, &simt::exchange(word, where)[lane], sizeof x);
  return x;
}
template <class T>
T from_below(T x, int lanes, Where where = Where::current()) {
  const int lane = thread() % kLanes;
  return from_lane(x, lane < lanes ? lane : lane - lanes, where);
}
template <class T>
T from_across(T x, int lanes, Where where = Where::current()) {
  return from_lane(x, (thread() % kLanes) ^ lanes, where);
}

// Folds what all lanes give, in the order of lanes.
template <class F>
uint32_t fold(uint32_t x, F f, Where where) {
  const uint64_t* const words = simt::exchange(x, where);
  uint32_t all = static_cast<uint32_t>(words[0]);
  for (int lane = 1; lane < kLanes; ++lane) all = f(all, static_cast<uint32_t>(words[lane]));
  return all;
}
inline uint32_t warp_sum(uint32_t x, Where where = Where::current()) {
  return fold(x, [](uint32_t a, uint32_t b) { return a + b; }, where);
}
inline uint32_t warp_max(uint32_t x, Where where = Where::current()) {
  return fold(x, [](uint32_t a, uint32_t b) { return a > b ? a : b; }, where);
}
inline uint32_t warp_min(uint32_t x, Where where = Where::current()) {
  return fold(x, [](uint32_t a, uint32_t b) { return a < b ? a : b; }, where);
}
inline uint32_t ballot(bool x, Where where = Where::current()) {
  return fold(x ? 1u << (thread() % kLanes) : 0u, [](uint32_t a, uint32_t b) { return a | b; }, where);
}

// Fibers change places at meetings only, so these are atomic as they stand.
inline uint32_t add_shared(uint32_t* to, uint32_t x) {
  const uint32_t before = *to;
  *to = before + x;
  return before;
}
inline void add_global(unsigned long long* to, unsigned long long x) { *to += x; }

inline int count_bits(uint32_t x) { return __builtin_popcount(x); }
inline int lowest_bit(uint32_t x) { return __builtin_ffs(static_cast<int>(x)) - 1; }
inline int32_t round_to_int(float x) { return x == x ? static_cast<int32_t>(std::nearbyint(x)) : 0; }

// As cub::BlockScan: the storage may be used again after the next barrier.
template <class T, int kThreads>
class BlockScan {
 public:
  struct TempStorage {
    T given[kThreads];
  };
  explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  void ExclusiveSum(T input, T& output) {
    storage_.given[thread()] = input;
    sync_block();
    output = 0;
    for (int i = 0; i < thread(); ++i) output += storage_.given[i];
  }

 private:
  TempStorage& storage_;
};

}  // namespace gpu
}  // namespace m2po
