// The one header behind which stands what only a GPU has: votes, shuffles, barriers, atomics, CUB, the launch. The kernels are
// written against these names. csrc/tests/simt/platform.h has the same names for the host, and so runs the kernels in tests.
#pragma once

#if defined(M2PO_SIMT)
#include "simt/platform.h"
#else

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cub/block/block_scan.cuh>

#define M2PO_DEVICE __device__ __forceinline__
#define M2PO_KERNEL(threads, blocks_per_multiprocessor) __global__ void __launch_bounds__(threads, blocks_per_multiprocessor)
#define M2PO_ARGUMENT(type) const __grid_constant__ type

namespace m2po {
namespace gpu {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

M2PO_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
M2PO_DEVICE int block() { return static_cast<int>(blockIdx.x); }
M2PO_DEVICE int blocks() { return static_cast<int>(gridDim.x); }

M2PO_DEVICE char* shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

M2PO_DEVICE void sync_warp() { __syncwarp(); }
M2PO_DEVICE void sync_block() { __syncthreads(); }
// All blocks; what any of them wrote before is visible to all after.
M2PO_DEVICE void sync_grid() { cooperative_groups::this_grid().sync(); }

// All lanes of a warp take part in each of these.
M2PO_DEVICE uint32_t ballot(bool x) { return __ballot_sync(kAllLanes, x); }
template <class T>
M2PO_DEVICE T from_lane(T x, int lane) {
  return __shfl_sync(kAllLanes, x, lane);
}
template <class T>
M2PO_DEVICE T from_below(T x, int lanes) {
  return __shfl_up_sync(kAllLanes, x, lanes);
}
template <class T>
M2PO_DEVICE T from_across(T x, int lanes) {
  return __shfl_xor_sync(kAllLanes, x, lanes);
}
M2PO_DEVICE uint32_t warp_sum(uint32_t x) { return __reduce_add_sync(kAllLanes, x); }
M2PO_DEVICE uint32_t warp_max(uint32_t x) { return __reduce_max_sync(kAllLanes, x); }
M2PO_DEVICE uint32_t warp_min(uint32_t x) { return __reduce_min_sync(kAllLanes, x); }

M2PO_DEVICE uint32_t add_shared(uint32_t* to, uint32_t x) { return atomicAdd(to, x); }
M2PO_DEVICE void add_global(unsigned long long* to, unsigned long long x) { atomicAdd(to, x); }

M2PO_DEVICE int count_bits(uint32_t x) { return __popc(x); }
M2PO_DEVICE int lowest_bit(uint32_t x) { return __ffs(static_cast<int>(x)) - 1; }
// To the nearest integer, ties to even; 0 for NaN.
M2PO_DEVICE int32_t round_to_int(float x) { return __float2int_rn(x); }

template <class T, int kThreads>
using BlockScan = cub::BlockScan<T, kThreads>;

}  // namespace gpu
}  // namespace m2po

#endif
