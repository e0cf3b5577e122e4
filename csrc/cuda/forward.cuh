// Selection and loss in one cooperative launch: one sweep over the tokens, then only candidates.
//
// Each warp sweeps a run of consecutive tokens and lists its candidates, in order. After one meeting of the grid every block
// knows whether the slack pays for all of them; if so, block 0 writes the results, and that was all. Else drop.cuh finds the cut.
#pragma once

#include "drop.cuh"
#include "list.cuh"
#include "load.cuh"
#include "sums.cuh"
#include "tuning.cuh"

namespace m2po {
namespace gpu {

// What one lane adds up over its tiles.
struct LaneSums {
  double policy = 0, kl = 0, v_settled = 0, v_gone = 0, ratio = 0, excess = 0;
  int64_t low = 0;
  uint32_t valid = 0, region = 0, clipped = 0, bad = 0, gone = 0, gone_region = 0;
  uint32_t ratio_max = 0, gone_min = 0xffffffffu;  // bits
  uint32_t first_bad = 0xffffffffu;
};

// One tile. The lane's candidates are set in the returned bits; v and term are theirs.
template <bool kPlain>
M2PO_DEVICE uint32_t sweep_tile(const ForwardJob& job, const Place& at, LaneSums& sums, float (&v_out)[kPerLane],
                                float (&term_out)[kPerLane]) {
  const Limits<float>& limits = job.options.limits;
  const Tile<kPlain> tile(job.in, at);
  uint32_t candidates = 0, valid_bits = 0;
  float losses[kPerLane];
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    float d = tile.log_probs[k] - tile.behavior[k], advantage = tile.advantages[k], q = 0;
    if constexpr (!kPlain)
      if (job.in.reference.data) q = tile.reference[k] - tile.log_probs[k];
    bool valid = tile.valid >> k & 1u;
    if (valid && not_finite(d, advantage, q)) {
      ++sums.bad;
      if (sums.first_bad > at.start + k) sums.first_bad = at.start + k;
      valid = !job.options.drop_bad;
    }
    if (!valid) d = advantage = q = 0;
    valid_bits |= static_cast<uint32_t>(valid) << k;

    const float v = d * d;
    bool region = in_quadrants(d, advantage), gone = false;
    if constexpr (!kPlain) {
      if (job.options.scope_all) region = valid && v == v;
      gone = valid && !(tile.kept >> k & 1u);
    }
    bool over = region && v > limits.candidate_above;
    if constexpr (!kPlain) over = over && !job.in.keep.data && !job.options.clip;

    const ExpTerms<float> e = exp_terms(d);
    const float ratio = valid ? e.ratio : 0.0f;
    const uint32_t ratio_bits = float_bits(ratio) & 0x7fffffffu;
    sums.ratio += ratio;
    sums.excess += e.excess;
    sums.ratio_max = sums.ratio_max > ratio_bits ? sums.ratio_max : ratio_bits;
    const bool clipped = beyond_clip(d, advantage, limits);
    const float v_settled = region && !over && !gone ? v : 0.0f;
    sums.v_settled += v_settled;
    sums.low += round_to_int(v_settled * job.low_scale[0] * job.low_scale[1]);
    sums.valid += valid;
    sums.region += region;
    sums.clipped += clipped;

    float weighed = ratio, weight = 1, kl = 0;
    if constexpr (!kPlain) {
      weighed = limited_ratio(ratio, d, advantage, clipped, job.options.clip, limits);
      if (job.in.weights.data) weight = tile.weights[k];
      if (job.in.reference.data && valid) kl = exp_terms(q).excess * limits.kl_coef * weight;
      sums.kl += kl;
      if (gone) {
        ++sums.gone;
        sums.gone_region += region;
        if (region) sums.v_gone += v;
        const uint32_t bits = float_bits(v);
        sums.gone_min = sums.gone_min < bits ? sums.gone_min : bits;
      }
    }
    const float policy = advantage != 0 && !gone ? -(weighed * advantage * weight) : 0.0f;
    if (!over) sums.policy += policy;
    candidates |= static_cast<uint32_t>(over) << k;
    v_out[k] = v;
    // What a kept candidate adds to the loss; or, where each token has its own, what a dropped one leaves.
    term_out[k] = kPlain || job.output != Output::per_token ? policy : kl;
    losses[k] = policy + kl;
  }
  if (job.output == Output::keep) store_flags(job.out, at, valid_bits);
  if constexpr (!kPlain)
    if (job.output == Output::per_token) store(job.out, at, losses);
  return candidates;
}

// What the candidates of a warp cost, and what they add to the sums if all are kept.
template <int kThreads>
M2PO_DEVICE void price(Shared<kThreads>& shared, const Unit& unit, const CandidateList& list) {
  Wide cost = 0;
  double policy = 0, v_sum = 0;
  for (uint32_t i = lane_index(); i < list.count(); i += kWarp) {
    const float v = list.v(i);
    cost += cost_of<float>(unit, {1, mantissa_of<float>(float_bits(v))}, exponent_field<float>(float_bits(v)));
    policy += list.term(i);
    v_sum += v;
  }
  cost = warp_total(cost);
  cost = cost < kUnpayable ? cost : kUnpayable;
  put_partial(shared, kCandidates, list.count());
  put_partial(shared, kCostLow, low_part(cost));
  put_partial(shared, kCostHigh, high_part(cost));
  put_partial(shared, kPolicyCandidates, to_word(warp_total(policy)));
  put_partial(shared, kVCandidates, to_word(warp_total(v_sum)));
}

template <bool kPlain, int kThreads>
M2PO_DEVICE void put_sums(Shared<kThreads>& shared, const LaneSums& sums) {
  put_partial(shared, kLowSum, static_cast<uint64_t>(warp_total(static_cast<long long>(sums.low))));
  put_partial(shared, kValid, warp_sum(sums.valid));
  put_partial(shared, kRegion, warp_sum(sums.region));
  put_partial(shared, kClipped, warp_sum(sums.clipped));
  put_partial(shared, kBad, warp_sum(sums.bad));
  put_partial(shared, kFirstBad, warp_min(sums.first_bad));
  put_partial(shared, kRatioMax, warp_max(sums.ratio_max));
  put_partial(shared, kPolicy, to_word(warp_total(sums.policy)));
  put_partial(shared, kVSettled, to_word(warp_total(sums.v_settled)));
  put_partial(shared, kRatio, to_word(warp_total(sums.ratio)));
  put_partial(shared, kExcess, to_word(warp_total(sums.excess)));
  put_partial(shared, kGone, kPlain ? 0 : warp_sum(sums.gone));
  put_partial(shared, kGoneRegion, kPlain ? 0 : warp_sum(sums.gone_region));
  put_partial(shared, kGoneMin, kPlain ? 0xffffffffu : warp_min(sums.gone_min));
  put_partial(shared, kKl, kPlain ? 0 : to_word(warp_total(sums.kl)));
  put_partial(shared, kVGone, kPlain ? 0 : to_word(warp_total(sums.v_gone)));
  put_partial(shared, kDropped, 0);
  put_partial(shared, kPolicyKept, 0);
  put_partial(shared, kVKept, 0);
}

template <int kThreads, bool kPlain>
M2PO_DEVICE void forward(const ForwardJob& job) {
  Shared<kThreads>& shared = *reinterpret_cast<Shared<kThreads>*>(shared_memory());
  clear_bins<kThreads>(job.work);
  clear_bins(shared, kFirstBins);

  constexpr int kWarps = Shared<kThreads>::kWarps;
  const int64_t tiles = tiles_of(job.in.tokens), warps = int64_t{kWarps} * blocks();
  const int64_t mine = int64_t{block()} * kWarps + warp_index();
  const int64_t first = mine * tiles / warps, last = (mine + 1) * tiles / warps;
  const uint32_t begin = static_cast<uint32_t>(first * kTile);
  CandidateList list(shared_memory() + sizeof(Shared<kThreads>), kWarps, job.list_room, job.work, begin);

  LaneSums sums;
  for (int64_t tile = first; tile < last; ++tile) {
    const Place at(static_cast<uint32_t>(tile * kTile + lane_index() * kPerLane), job.in);
    float v[kPerLane], term[kPerLane];
    const uint32_t candidates = sweep_tile<kPlain>(job, at, sums, v, term);
    if (ballot(candidates != 0)) list.append(candidates, v, term, at.start - begin);
  }
  sync_warp();
  put_sums<kPlain>(shared, sums);
  price(shared, job.unit, list);
  publish(shared, job.work, 0, kKinds);
  sync_grid();

  gather(shared, job.work, 0, kDecisive);
  const int64_t n_candidates = static_cast<int64_t>(shared.total[kCandidates]);
  const int64_t n_low = static_cast<int64_t>(shared.total[kRegion] - shared.total[kGoneRegion]) - n_candidates;
  const Wide slack = slack_of(job.unit, n_low, static_cast<int64_t>(shared.total[kLowSum]));
  const Wide cost = joined(shared.total[kCostLow], shared.total[kCostHigh]);
  if (n_candidates == 0 || cost <= slack) {
    if (block() == 0) finish(shared, job, {}, kPolicyCandidates, kVCandidates);
    return;
  }
  drop(shared, job, list, slack);
}

}  // namespace gpu

// Shared memory of one block.
template <int kThreads>
int64_t shared_bytes_of(uint32_t list_room) {
  return static_cast<int64_t>(sizeof(gpu::Shared<kThreads>)) +
         int64_t{gpu::CandidateList::kEntryBytes} * list_room * (kThreads / kWarp);
}

template <int kThreads, bool kPlain>
M2PO_KERNEL(kThreads, kPlain ? kBlocksPerMultiprocessor : 1)
forward_kernel(M2PO_ARGUMENT(ForwardJob) job) {
  gpu::forward<kThreads, kPlain>(job);
}

}  // namespace m2po
