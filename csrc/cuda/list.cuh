// The candidates of one warp in the order of their positions: in its part of the shared memory, the rest in global memory.
#pragma once

#include "job.h"
#include "platform.cuh"

namespace m2po {
namespace gpu {

M2PO_DEVICE int lane_index() { return thread() % kWarp; }
M2PO_DEVICE int warp_index() { return thread() / kWarp; }
M2PO_DEVICE uint32_t lanes_below() { return (1u << lane_index()) - 1u; }

class CandidateList {
 public:
  // `shared`: where the lists of all warps of the block begin. `begin`: position of the warp's first token.
  M2PO_DEVICE CandidateList(char* shared, int warps, uint32_t room, const Workspace& work, uint32_t begin)
      : room_(room), begin_(begin), far_v_(work.list_v), far_term_(work.list_term), far_offset_(work.list_offset) {
    const int64_t all = int64_t{warps} * room, mine = int64_t{warp_index()} * room;
    v_ = reinterpret_cast<float*>(shared) + mine;
    term_ = v_ + all;
    offset_ = reinterpret_cast<uint32_t*>(shared) + 2 * all + mine;
  }
  static constexpr int kEntryBytes = 12;

  // Appends the tokens whose bits are set in `chosen`; all lanes take part. `offset`: of the lane's first token.
  M2PO_DEVICE void append(uint32_t chosen, const float (&v)[kPerLane], const float (&term)[kPerLane], uint32_t offset) {
    const uint32_t mine = static_cast<uint32_t>(count_bits(chosen));
    uint32_t through = mine;
#pragma unroll
    for (int lanes = 1; lanes < kWarp; lanes *= 2) {
      const uint32_t below = from_below(through, lanes);
      if (lane_index() >= lanes) through += below;
    }
    uint32_t at = count_ + through - mine;
#pragma unroll
    for (int k = 0; k < kPerLane; ++k)
      if (chosen >> k & 1u) put(at++, v[k], term[k], offset + k);
    count_ += from_lane(through, kWarp - 1);
  }

  M2PO_DEVICE uint32_t count() const { return count_; }
  M2PO_DEVICE float v(uint32_t i) const { return i < room_ ? v_[i] : far_v_[far(i)]; }
  M2PO_DEVICE float term(uint32_t i) const { return i < room_ ? term_[i] : far_term_[far(i)]; }
  M2PO_DEVICE uint32_t position(uint32_t i) const { return begin_ + (i < room_ ? offset_[i] : far_offset_[far(i)]); }

 private:
  M2PO_DEVICE void put(uint32_t i, float v, float term, uint32_t offset) {
    if (i < room_) {
      v_[i] = v;
      term_[i] = term;
      offset_[i] = offset;
    } else {
      far_v_[far(i)] = v;
      far_term_[far(i)] = term;
      far_offset_[far(i)] = offset;
    }
  }
  // A warp has no more candidates than tokens, so the places from its first token on are its own.
  M2PO_DEVICE int64_t far(uint32_t i) const { return int64_t{begin_} + i; }

  uint32_t room_, begin_, count_ = 0;
  float *v_, *term_;
  uint32_t* offset_;
  float *far_v_, *far_term_;
  uint32_t* far_offset_;
};

}  // namespace gpu
}  // namespace m2po
