// d loss / d log_probs in one launch: recomputed from the inputs and the cut, nothing per token was saved.
#pragma once

#include "list.cuh"
#include "load.cuh"
#include "tuning.cuh"

namespace m2po {
namespace gpu {

template <bool kPlain>
M2PO_DEVICE void backward_tile(const BackwardJob& job, const Place& at) {
  const Limits<float>& limits = job.options.limits;
  float factors[kPerLane];
  if (job.per_token) decode(job.grad, load(job.grad, at), factors);
  const Tile<kPlain> tile(job.in, at);
  const double grad = job.per_token ? 0.0 : *static_cast<const float*>(job.grad.data);
  const double policy_scale = job.scales[0], kl_scale = job.scales[1] * limits.kl_coef;
  const uint32_t cut = static_cast<uint32_t>(job.cut[0]);
  const int64_t last = job.cut[1];
  float out[kPerLane];
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    float d = tile.log_probs[k] - tile.behavior[k], advantage = tile.advantages[k], q = 0;
    if constexpr (!kPlain)
      if (job.in.reference.data) q = tile.reference[k] - tile.log_probs[k];
    bool valid = tile.valid >> k & 1u;
    if (job.options.drop_bad) valid = valid && !not_finite(d, advantage, q);
    if (!valid) d = advantage = q = 0;
    const float v = d * d;
    bool region = in_quadrants(d, advantage);
    bool off = advantage == 0;  // no policy gradient
    if constexpr (!kPlain) region = job.options.scope_all ? valid && v == v : region;
    const uint32_t bits = float_bits(v);
    const bool dropped = region && (bits > cut || (bits == cut && int64_t{at.start} + k <= last));
    if constexpr (kPlain) {
      off = off || dropped;
    } else {
      if (job.options.clip) {
        off = off || beyond_clip(d, advantage, limits);
      } else {
        off = off || (job.in.keep.data ? !(tile.kept >> k & 1u) : dropped);
      }
      off = off || beyond_cap(d, advantage, limits);
    }
    const double factor = job.per_token ? static_cast<double>(factors[k]) : grad;
    float weight = 1;
    if constexpr (!kPlain)
      if (job.in.weights.data) weight = tile.weights[k];
    const float coefficient = static_cast<float>(-factor * policy_scale);
    float gradient = policy_gradient(exp_terms(d).ratio, advantage, coefficient * weight, off);
    if constexpr (!kPlain)
      if (job.in.reference.data)
        gradient -= kl_gradient(exp_terms(q).minus_one, static_cast<float>(factor * kl_scale), weight, valid);
    out[k] = gradient;
  }
  store(job.out, at, out);
}

}  // namespace gpu

template <int kThreads, bool kPlain>
M2PO_KERNEL(kThreads, kBlocksPerMultiprocessor)
backward_kernel(M2PO_ARGUMENT(BackwardJob) job) {
  const int64_t tiles = tiles_of(job.in.tokens), warps = int64_t{gpu::blocks()} * (kThreads / kWarp);
  const int64_t first = int64_t{gpu::block()} * (kThreads / kWarp) + gpu::warp_index();
  for (int64_t tile = first; tile < tiles; tile += warps)
    gpu::backward_tile<kPlain>(job, gpu::Place(static_cast<uint32_t>(tile * kTile + gpu::lane_index() * kPerLane), job.in));
}

}  // namespace m2po
