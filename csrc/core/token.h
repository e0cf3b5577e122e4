// What Algorithm 1, PPO's clip and the loss say about tokens, each rule once. `V` is a vector of the CPU kernels or a single
// float; it brings along choose(condition, a, b), absolute(x) and flip_sign(x, y): x, its sign turned where y has one.
//
// d and v = d * d are rounded operation by operation. Whoever compiles this must not let a compiler contract them
// (-ffp-contract=off, -fmad=false).
#pragma once

#include "host_device.h"
#include "types.h"

namespace m2po {
inline namespace M2PO_ISA {

// Where d, the advantage or q is NaN or infinite.
template <class V>
M2PO_SHARED auto not_finite(V d, V advantage, V q) {
  return !((d - d) + (advantage - advantage) + (q - q) == V(0));
}

// d in the direction that the advantage rewards.
template <class V>
M2PO_SHARED V along(V d, V advantage) {
  return flip_sign(d, advantage);
}

// Where there is an advantage; false for NaN.
template <class V>
M2PO_SHARED auto moves(V advantage) {
  return absolute(advantage) > V(0);
}

// (A > 0 and d > 0) or (A < 0 and d < 0).
template <class V>
M2PO_SHARED auto in_quadrants(V d, V advantage) {
  return along(d, advantage) > V(0) && moves(advantage);
}

// Where PPO's clip takes the gradient.
template <class V, class Real>
M2PO_SHARED auto beyond_clip(V d, V advantage, const Limits<Real>& limits) {
  const V bound = choose(advantage < V(0), V(-limits.log_low), V(limits.log_high));
  return along(d, advantage) > bound && moves(advantage);
}

// Where the dual clip holds the ratio.
template <class V, class Real>
M2PO_SHARED auto beyond_cap(V d, V advantage, const Limits<Real>& limits) {
  return advantage < V(0) && d > V(limits.log_cap);
}

// The ratio as it enters the loss.
template <class V, class Mask, class Real>
M2PO_SHARED V limited_ratio(V ratio, V d, V advantage, Mask clipped, bool clip, const Limits<Real>& limits) {
  if (clip) {
    ratio = choose(clipped, V(limits.ratio_high), ratio);
    ratio = choose(clipped && advantage < V(0), V(limits.ratio_low), ratio);
  }
  return choose(beyond_cap(d, advantage, limits), V(limits.cap), ratio);
}

// coefficient: minus what multiplies the policy term. 0 where `off`; an infinite ratio times nothing is nothing.
template <class V, class Mask>
M2PO_SHARED V policy_gradient(V ratio, V advantage, V coefficient, Mask off) {
  return choose(off || coefficient == V(0), V(0), ratio * (advantage * coefficient));
}

// d of the KL term, to be taken off; minus_one = exp(q) - 1.
template <class V, class Mask>
M2PO_SHARED V kl_gradient(V minus_one, V coefficient, V weight, Mask valid) {
  return choose(!valid || coefficient == V(0), V(0), minus_one * (coefficient * weight));
}

}  // namespace M2PO_ISA
}  // namespace m2po
