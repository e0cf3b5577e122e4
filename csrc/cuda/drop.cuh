// After the sweep, where something is to be dropped: the cut from the candidates alone, their sums; and the end of every launch.
//
// Three digits of v's bits, first the highest. For each the grid adds up a histogram and meets; then every block by itself finds
// the bin in which the slack runs out. All members of the last bin are equal, and their earliest positions are dropped.
#pragma once

#include "../core/cut.h"
#include "sums.cuh"

namespace m2po {
namespace gpu {

// Lanes of a warp that add to one bin at once, from which on they are added up first: an atomic on one address of the shared
// memory takes its turn per lane, a round of votes about as long as this many turns. By reasoning; not yet measured.
inline constexpr int kCrowd = 4;

// The histograms of the grid; they are added to after its next meeting.
template <int kThreads>
M2PO_DEVICE void clear_bins(const Workspace& work) {
  constexpr int kBins = kFirstBins + 2 * kNextBins;  // lay_out puts the second and the third behind the first
  for (int i = block() * kThreads + thread(); i < kBins; i += blocks() * kThreads) work.first[i] = {0, 0};
}

template <int kThreads>
M2PO_DEVICE void clear_bins(Shared<kThreads>& shared, int bins) {
  for (int i = thread(); i < bins; i += kThreads) shared.count[i] = shared.low[i] = shared.high[i] = 0;
}

template <int kThreads>
M2PO_DEVICE void add_to_bin(Shared<kThreads>& shared, uint32_t bin, uint32_t count, uint32_t mantissas) {
  add_shared(&shared.count[bin], count);
  const uint32_t before = add_shared(&shared.low[bin], mantissas);
  if (before + mantissas < before) add_shared(&shared.high[bin], 1);
}

// Counts the lanes in `chosen` at their bins; all lanes take part. Batches whose values are all equal, or few, cost no more.
template <int kThreads>
M2PO_DEVICE void add_to_bins(Shared<kThreads>& shared, uint32_t bin, uint32_t mantissa, bool chosen) {
  for (uint32_t rest = ballot(chosen); rest != 0;) {
    const uint32_t leader = from_lane(bin, lowest_bit(rest));
    const bool mine = chosen && bin == leader;
    const uint32_t crowd = ballot(mine);
    if (count_bits(crowd) < kCrowd) break;
    const uint32_t sum = warp_sum(mine ? mantissa : 0u);  // below 2^29
    if (lane_index() == 0) add_to_bin(shared, leader, static_cast<uint32_t>(count_bits(crowd)), sum);
    chosen = chosen && !mine;
    rest &= ~crowd;
  }
  if (chosen) add_to_bin(shared, bin, 1, mantissa);
}

// The digit of `bits` bits at `shift` of all candidates in `list` whose higher bits are `prefix`, into the global histogram.
template <int kThreads>
M2PO_DEVICE void count_digit(Shared<kThreads>& shared, const CandidateList& list, GlobalBin* to, uint32_t prefix, int shift,
                             int bins) {
  const uint32_t rounds = (list.count() + kWarp - 1) / kWarp;
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t i = round * kWarp + lane_index();
    const bool listed = i < list.count();
    const uint32_t bits = listed ? float_bits(list.v(i)) : 0u;
    const uint32_t digits = bits >> shift, bin = digits % bins;
    add_to_bins(shared, bin, static_cast<uint32_t>(mantissa_of<float>(bits)), listed && digits / bins == prefix);
  }
  sync_block();
  for (int b = thread(); b < bins; b += kThreads) {
    if (shared.count[b] == 0) continue;
    add_global(&to[b].count, shared.count[b]);
    add_global(&to[b].mantissas, (static_cast<unsigned long long>(shared.high[b]) << 32) | shared.low[b]);
  }
}

// The sum of `cost` over the threads before this one. In two parts, as CUB's shuffles take 128 bits through a stack frame.
template <int kThreads>
M2PO_DEVICE Wide cost_before(Shared<kThreads>& shared, Wide cost) {
  unsigned long long low = 0, high = 0;
  using Scan = BlockScan<unsigned long long, kThreads>;
  Scan(shared.scan[0]).ExclusiveSum(low_part(cost), low);
  Scan(shared.scan[1]).ExclusiveSum(high_part(cost), high);
  return joined(low, high);
}

// Pays for bins in ascending order: the first that the slack cannot pay for into shared.bin, its members, the slack before it.
// There is such a bin. Every candidate costs more than nothing, so those before the first unpaid one are all paid.
template <int kThreads, int kBins>
M2PO_DEVICE void find_unpaid(Shared<kThreads>& shared, const GlobalBin* bins, const Unit& unit, Wide slack, uint32_t prefix,
                             int shift) {
  constexpr int kMine = kBins / kThreads;
  const auto count_at = [&](int i) { return static_cast<int64_t>(bins[i].count); };
  const auto cost_at = [&](int i) {
    const uint32_t bits = (prefix * kBins + i) << shift;
    const Wide mantissas = static_cast<Wide>(bins[i].mantissas);
    return cost_of<float>(unit, {count_at(i), mantissas}, exponent_field<float>(bits));
  };
  Wide mine = 0;
  for (int j = 0; j < kMine; ++j) mine += cost_at(thread() * kMine + j);
  const Wide before = cost_before(shared, mine);
  Wide left = slack - before;
  if (before == 0 || left >= 0) {
    for (int j = 0; j < kMine; ++j) {
      const int i = thread() * kMine + j;
      const Wide cost = cost_at(i);
      if (cost > 0 && cost > left) {
        shared.bin = i;
        shared.members = count_at(i);
        shared.slack = left;
        break;
      }
      left -= cost;
    }
  }
  sync_block();
}

struct Decision {
  uint32_t value = 0x7f800000u;  // bits of the smallest dropped v; infinity and -1: nothing is dropped
  bool drops = false;
};

M2PO_DEVICE double share(double sum, int64_t n) { return n > 0 ? sum / static_cast<double>(n) : 0.0; }

// Loss, scales, cut and metrics, from what all blocks left. By one block.
template <int kThreads>
M2PO_DEVICE void finish(Shared<kThreads>& shared, const ForwardJob& job, Decision decision, int policy_kind, int v_kind) {
  sync_block();  // the totals may still be read
  gather(shared, job.work, 0, kKinds);
  if (thread() != 0) return;
  const auto count = [&](int kind) { return static_cast<int64_t>(shared.total[kind]); };
  const auto sum = [&](int kind) { return to_double(shared.total[kind]); };
  const int64_t valid = count(kValid), region = count(kRegion), bad = count(kBad), clipped = count(kClipped);
  const int64_t dropped_here = count(kDropped), dropped = dropped_here + count(kGone);
  const int64_t n_kept = region - count(kGoneRegion) - dropped_here;
  const double v_all = sum(kVSettled) + sum(kVGone) + sum(kVCandidates), v_kept = sum(kVSettled) + sum(v_kind);
  const uint32_t gone_min = static_cast<uint32_t>(shared.total[kGoneMin]);
  const uint32_t cut_bits = decision.value < gone_min ? decision.value : gone_min;

  job.cut[0] = decision.value;
  if (!decision.drops) job.cut[1] = -1;
  int64_t* const counts = job.counts;
  counts[0] = valid;
  counts[1] = region;
  counts[2] = count(kCandidates);
  counts[3] = dropped;
  counts[4] = bad;
  counts[5] = clipped;
  counts[6] = bad > 0 ? count(kFirstBad) : -1;
  double* const floats = job.floats;
  floats[0] = share(v_all, region);
  floats[1] = share(v_kept, n_kept);
  floats[2] = share(static_cast<double>(dropped), valid);
  floats[3] = share(static_cast<double>(region), valid);
  floats[4] = bits_float(cut_bits);
  floats[5] = share(sum(kRatio), valid);
  floats[6] = bits_float(static_cast<uint32_t>(shared.total[kRatioMax]));
  floats[7] = share(sum(kExcess), valid);
  floats[8] = share(static_cast<double>(clipped), valid);
  if (job.output == Output::keep) return;

  double n_policy = 1, n_kl = 1;
  if (job.normalizer != Normalizer::one) {
    n_kl = static_cast<double>(valid);
    n_policy = static_cast<double>(job.normalizer == Normalizer::kept ? valid - dropped : valid);
    if (job.denominators) {
      n_policy = job.denominators[0];
      n_kl = job.denominators[job.denominators_stride];
    }
  }
  // A scale of 0 says that there is nothing to divide by: the loss is then 0, whatever the sums hold.
  const double policy_scale = n_policy != 0 ? 1 / n_policy : 0.0, kl_scale = n_kl != 0 ? 1 / n_kl : 0.0;
  job.scales[0] = policy_scale;
  job.scales[1] = kl_scale;
  if (job.output == Output::per_token) return;
  double loss = policy_scale != 0 ? (sum(kPolicy) + sum(policy_kind)) * policy_scale : 0.0;
  loss += kl_scale != 0 ? sum(kKl) * kl_scale : 0.0;
  *static_cast<float*>(const_cast<void*>(job.out.data)) = static_cast<float>(loss);
}

// Candidates of this warp that equal `value`.
M2PO_DEVICE uint32_t count_equals(const CandidateList& list, uint32_t value) {
  uint32_t equals = 0;
  for (uint32_t i = lane_index(); i < list.count(); i += kWarp) equals += float_bits(list.v(i)) == value;
  return warp_sum(equals);
}

// Takes the dropped candidates of this warp out of the per-token output and adds up the rest. `quota`: how many of its equals,
// the first ones, are dropped; `last`: whether the last of those is the last one dropped of all.
template <int kThreads>
M2PO_DEVICE void settle(Shared<kThreads>& shared, const ForwardJob& job, const CandidateList& list, uint32_t value, uint32_t quota,
                        bool last) {
  uint32_t dropped = 0, passed = 0;
  double policy = 0, v_kept = 0;
  const uint32_t rounds = (list.count() + kWarp - 1) / kWarp;
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t i = round * kWarp + lane_index();
    const bool listed = i < list.count();
    const float v = listed ? list.v(i) : 0.0f;
    const bool equal = listed && float_bits(v) == value;
    const uint32_t equals = ballot(equal);
    const uint32_t rank = passed + static_cast<uint32_t>(count_bits(equals & lanes_below()));
    passed += static_cast<uint32_t>(count_bits(equals));
    if (listed && (float_bits(v) > value || (equal && rank < quota))) {
      ++dropped;
      const uint32_t position = list.position(i);
      if (job.output == Output::keep) static_cast<uint8_t*>(const_cast<void*>(job.out.data))[position] = 0;
      if (job.output == Output::per_token) static_cast<float*>(const_cast<void*>(job.out.data))[position] = list.term(i);
      if (last && equal && rank == quota - 1) job.cut[1] = position;
    } else if (listed) {
      policy += list.term(i);
      v_kept += v;
    }
  }
  put_partial(shared, kDropped, warp_sum(dropped));
  put_partial(shared, kPolicyKept, to_word(warp_total(policy)));
  put_partial(shared, kVKept, to_word(warp_total(v_kept)));
}

template <int kThreads>
M2PO_DEVICE void drop(Shared<kThreads>& shared, const ForwardJob& job, const CandidateList& list, Wide slack) {
  count_digit(shared, list, job.work.first, 0, kFirstShift, kFirstBins);
  sync_grid();
  find_unpaid<kThreads, kFirstBins>(shared, job.work.first, job.unit, slack, 0, kFirstShift);
  uint32_t prefix = static_cast<uint32_t>(shared.bin);
  slack = shared.slack;

  clear_bins(shared, kNextBins);
  sync_block();
  count_digit(shared, list, job.work.second, prefix, kNextBits, kNextBins);
  sync_grid();
  find_unpaid<kThreads, kNextBins>(shared, job.work.second, job.unit, slack, prefix, kNextBits);
  prefix = prefix * kNextBins + static_cast<uint32_t>(shared.bin);
  slack = shared.slack;

  clear_bins(shared, kNextBins);
  sync_block();
  count_digit(shared, list, job.work.third, prefix, 0, kNextBins);
  for (int b = thread(); b < kNextBins; b += kThreads) job.work.last_digits[block() * kNextBins + b] = shared.count[b];
  sync_grid();
  find_unpaid<kThreads, kNextBins>(shared, job.work.third, job.unit, slack, prefix, 0);
  const int bin = shared.bin;
  const uint32_t value = prefix * kNextBins + static_cast<uint32_t>(bin);
  const Wide cost = cost_of<float>(job.unit, {1, mantissa_of<float>(value)}, exponent_field<float>(value));
  const int64_t n_dropped = shared.members - affordable_of(shared.slack, cost, shared.members);

  // The equals of the cut lie in the order of blocks, and in a block in that of its warps.
  if (warp_index() == 0) {
    uint32_t before = 0;
    for (int b = lane_index(); b < block(); b += kWarp) before += job.work.last_digits[b * kNextBins + bin];
    before = warp_sum(before);
    if (lane_index() == 0) shared.equals_before = before;
  }
  const uint32_t mine = count_equals(list, value);
  if (lane_index() == 0) shared.equals[warp_index()] = mine;
  sync_block();
  int64_t left = n_dropped - shared.equals_before;
  for (int warp = 0; warp < warp_index(); ++warp) left -= shared.equals[warp];
  const uint32_t quota = left <= 0 ? 0u : left < mine ? static_cast<uint32_t>(left) : mine;
  settle(shared, job, list, value, quota, left > 0 && left <= mine);
  publish(shared, job.work, kDropped, kDropped + 1);
  publish(shared, job.work, kPolicyKept, kKinds);
  sync_grid();
  if (block() == 0) finish(shared, job, {value, true}, kPolicyKept, kVKept);
}

}  // namespace gpu
}  // namespace m2po
