// Every number that a chip asks for, each with its reason. By reasoning where nothing else is said; not yet measured.
#pragma once

#include <cstdint>

namespace m2po {

// 8 warps a block, 2 blocks on a multiprocessor: 128 registers a thread, which the sweep needs for 8 tokens a lane without
// spilling. Each lane has 8 * (4 + 4) bytes and more on their way, so a multiprocessor 512 * 72 = 36 KB: above bandwidth times
// latency of every chip here (H200: 4.8 TB/s * 0.7 us / 132 = 25 KB).
// With every option the sweep spills a few registers at 128 (sm_80, sm_90), so there one block has them all.
inline constexpr int kThreadsPerBlock = 256;
inline constexpr int kBlocksPerMultiprocessor = 2;

// Candidates of one warp in shared memory, 12 bytes each. Two blocks share a multiprocessor's memory, each with its histogram and
// sums of 31 KB; what does not fit goes to global memory, mostly into the second-level cache.
struct Tuning {
  int arch;            // compute capability, from this one on
  uint32_t list_room;  // per warp
};
inline constexpr Tuning kTunings[] = {
    {80, 512},    // A100, A800: 164 KB a multiprocessor; 31 + 48 KB a block
    {86, 192},    // A10, A40, RTX 30: 100 KB; 31 + 18 KB
    {89, 192},    // RTX 4090, L4, L40: 100 KB
    {90, 768},    // H100, H200: 228 KB; 31 + 72 KB. 2^20 tokens are 2 tiles = 512 tokens a warp: all fit
    {100, 768},   // B200: 228 KB
    {120, 192},   // RTX 50: 100 KB
};

inline uint32_t list_room_of(int arch) {
  uint32_t room = kTunings[0].list_room;
  for (const Tuning& tuning : kTunings)
    if (arch >= tuning.arch) room = tuning.list_room;
  return room;
}

}  // namespace m2po
