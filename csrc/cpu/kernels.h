// The two per-block kernels, once per ISA (kernels.cpp), and the table through which the one for this machine is called.
#pragma once

#include "../core/types.h"
#include "logits.h"

namespace m2po {

// Reads tokens [begin, begin + n), n <= kBlock. Writes their sums and appends the candidates, whose arrays have room for
// n + kCandidateRoom. `keep_out` (0/1) and `loss_out` are contiguous over all tokens, or null; a candidate's keep is written
// as if kept, its loss without the policy term.
template <class Real>
using SweepFn = void (*)(const Batch&, const Rule&, const Limits<Real>&, int64_t begin, int n, BlockSums<Real>*,
                         Candidates<Real>*, uint8_t* keep_out, Real* loss_out);

// Full-vector stores may run past the last candidate by this many elements.
inline constexpr int kCandidateRoom = 16;

// What multiplies each term's gradient: grad_output / D, in the type of d; or per token (reduction "none").
template <class Real>
struct GradScale {
  Real policy, kl;
  Source per_token;
};

// Writes d loss / d log_probs of tokens [begin, begin + n) into `out`, which may have any strides and dtype. A token of T is
// dropped if v > drop_above (the caller splits a block at the cut's position, so that one bound does for ties too).
template <class Real>
using BackwardFn = void (*)(const Batch&, const Rule&, const Limits<Real>&, const GradScale<Real>&, Real drop_above,
                            int64_t begin, int n, const Source& out);

struct Kernels {
  const char* isa;
  SweepFn<float> sweep_f32;
  SweepFn<double> sweep_f64;
  BackwardFn<float> backward_f32;
  BackwardFn<double> backward_f64;
  LogSoftmaxFn log_softmax;
  LogSoftmaxBackwardFn log_softmax_backward;
};

// The kernels of the best ISA that this processor and its operating system offer (isa.h).
const Kernels& kernels();

}  // namespace m2po
