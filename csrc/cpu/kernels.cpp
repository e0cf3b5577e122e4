// The sweep and the backward over one block of tokens. Compiled once per ISA, with M2PO_ISA naming the inline namespace: two
// objects of this file share no inline function, so the linker cannot keep the AVX-512 copy for a machine without it. For the
// same reason nothing here may instantiate standard-library functions that are not forced inline.
#include "kernels.h"

#include <limits>
#include <type_traits>

#include "gather.h"
#include "simd.h"

#define M2PO_STRING2(x) #x
#define M2PO_STRING(x) M2PO_STRING2(x)
#define M2PO_CONCAT2(a, b) a##b
#define M2PO_CONCAT(a, b) M2PO_CONCAT2(a, b)

namespace m2po {
inline namespace M2PO_ISA {

// logits_kernels.cpp
void log_softmax_rows(const LogitsJob& job, int64_t begin, int64_t end, PerRow<float> log_probs, PerRow<float> entropy);
void log_softmax_backward_rows(const LogitsJob& job, int64_t begin, int64_t end, const LogitsGrad& grad, PerRow<void> out);

namespace {

template <class Real>
using VectorOf = std::conditional_t<std::is_same_v<Real, float>, FloatV, ScalarDouble>;

// A block's inputs as contiguous arrays, padded with invalid tokens to a whole number of vectors.
template <class Real>
struct Block {
  static constexpr int kPadded = kBlock + 16;
  alignas(64) Real scratch[5][kPadded];
  alignas(64) uint8_t flags[2][kPadded];
  const Real *log_probs, *behavior, *advantages, *reference, *weights;
  const uint8_t *valid, *kept;

  Block(const Batch& batch, int64_t begin, int n, int lanes) {
    const bool direct = n % lanes == 0;
    const int padded = (n + lanes - 1) / lanes * lanes;
    const auto get = [&](const Source& source, auto* to) -> const std::remove_pointer_t<decltype(to)>* {
      if (!source.data) return nullptr;
      for (int i = n; i < padded; ++i) to[i] = 0;
      return fetch(source, batch.grid, begin, n, to, direct);
    };
    log_probs = get(batch.log_probs, scratch[0]);
    behavior = get(batch.behavior_log_probs, scratch[1]);
    advantages = get(batch.advantages, scratch[2]);
    reference = get(batch.ref_log_probs, scratch[3]);
    weights = get(batch.weights, scratch[4]);
    valid = get(batch.mask, flags[0]);
    kept = get(batch.keep, flags[1]);
  }

  // Takes tokens out of `valid`, which is copied first, as it may be the caller's.
  void invalidate(int token, int n) {
    if (valid != flags[0]) {
      for (int i = 0; i < n; ++i) flags[0][i] = valid[i];
      valid = flags[0];
    }
    flags[0][token] = 0;
  }
};

template <class V>
M2PO_INLINE V load(const typename V::value_type* from) {
  return V(from, stdx::element_aligned);
}

// Appends the lanes in `chosen`; writes whole vectors, so that the arrays need room for one more.
template <class V>
M2PO_INLINE void append(Candidates<typename V::value_type>& list, typename V::mask_type chosen, V v, V policy, int offset) {
  int count = list.count;
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (std::is_same_v<V, FloatV>) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 k = static_cast<__mmask16>(chosen.__to_bitset().to_ulong());
    _mm512_storeu_ps(list.v + count, _mm512_maskz_compress_ps(k, static_cast<__m512>(v)));
    _mm512_storeu_ps(list.policy + count, _mm512_maskz_compress_ps(k, static_cast<__m512>(policy)));
    const __m512i place = _mm512_maskz_compress_epi32(k, _mm512_add_epi32(lane, _mm512_set1_epi32(offset)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(list.offset + count), _mm512_cvtepi32_epi16(place));
    list.count = count + __builtin_popcount(k);
    return;
  }
#endif
  for (size_t lane = 0; lane < V::size(); ++lane) {
    list.v[count] = v[lane];
    list.policy[count] = policy[lane];
    list.offset[count] = static_cast<uint16_t>(offset + static_cast<int>(lane));
    count += chosen[lane];
  }
  list.count = count;
}

// kPlain: Algorithm 1 over the quadrants, with no option that adds a term, an input or an output.
template <class V, bool kPlain>
void sweep(const Batch& batch, const Rule& rule, const Limits<typename V::value_type>& limits, int64_t begin, int n,
           BlockSums<typename V::value_type>* out, Candidates<typename V::value_type>* list, uint8_t* keep_out,
           typename V::value_type* loss_out) {
  using Real = typename V::value_type;
  using Mask = typename V::mask_type;
  constexpr int kLanes = V::size();
  constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  Block<Real> block(batch, begin, n, kLanes);
  WideSum<V> gain_sum, kl_sum, settled_sum, gone_sum, ratio_sum, excess_sum;
  V valid_count = 0, region_count = 0, clipped_count = 0, gone_count = 0, gone_region_count = 0;
  V ratio_max = 0, gone_min = kInfinity;
  int32_t bad_count = 0;
  int64_t first_bad = std::numeric_limits<int64_t>::max();
  bool nan_ratio = false;

  for (int i = 0; i < n; i += kLanes) {
    const V log_probs = load<V>(block.log_probs + i);
    V d = log_probs - load<V>(block.behavior + i);
    V advantage = load<V>(block.advantages + i);
    V q = 0;
    V size = absolute(d) + absolute(advantage);
    if constexpr (!kPlain) {
      if (block.reference) {
        q = load<V>(block.reference + i) - log_probs;
        size += absolute(q);
      }
    }
    Mask valid = load_mask<V>(block.valid + i);
    // Odd: NaN or infinite, or too large for exp_terms_quick.
    const bool odd = stdx::any_of(valid && !(size < V(kSmall)));
    if (odd) [[unlikely]] {
      const Mask bad = not_finite(d, advantage, q) && valid;
      if (stdx::any_of(bad)) {
        bad_count += stdx::popcount(bad);
        first_bad = std::min<int64_t>(first_bad, begin + i + stdx::find_first_set(bad));
        if (rule.nonfinite == Nonfinite::drop) {
          valid = valid && !bad;
          for (int lane = 0; lane < kLanes; ++lane)
            if (bad[lane]) block.invalidate(i + lane, n);
        }
      }
    }
    stdx::where(!valid, d) = V(0);
    stdx::where(!valid, advantage) = V(0);

    const V v = d * d;
    Mask region = in_quadrants(d, advantage);
    if constexpr (!kPlain)
      if (rule.scope_all) region = valid && v == v;
    Mask over = region && v > V(limits.candidate_above);
    Mask gone(false);
    if constexpr (!kPlain) {
      if (block.kept) gone = valid && !load_mask<V>(block.kept + i);
      if (block.kept || rule.clip) over = Mask(false);
    }

    const ExpTerms<V> e = exp_terms_quick(d, odd ? clamp(d, -104.0f, 89.0f) : d);
    V ratio = e.ratio;
    stdx::where(!valid, ratio) = V(0);
    ratio_sum.add(ratio);
    excess_sum.add(e.excess);
    ratio_max = stdx::max(ratio_max, ratio);
    if (odd) [[unlikely]] nan_ratio = nan_ratio || stdx::any_of(ratio != ratio);

    const Mask clipped = beyond_clip(d, advantage, limits);
    V weighed = ratio;
    if constexpr (!kPlain) weighed = limited_ratio(ratio, d, advantage, clipped, rule.clip, limits);
    V gain = weighed * advantage;  // minus the policy loss
    V weight = 1;
    if constexpr (!kPlain) {
      if (block.weights) {
        weight = load<V>(block.weights + i);
        gain *= weight;
      }
    }
    if (stdx::any_of(over)) append(*list, over, v, V(-gain), i);
    V settled_gain = 0;
    stdx::where(advantage != V(0) && !over && !gone, settled_gain) = gain;
    gain_sum.add(settled_gain);

    V v_settled = 0;
    stdx::where(region && !over && !gone, v_settled) = v;
    settled_sum.add_rounded(v_settled, limits);
    stdx::where(valid, valid_count) += V(1);
    stdx::where(region, region_count) += V(1);
    stdx::where(clipped, clipped_count) += V(1);

    if constexpr (!kPlain) {
      V kl = 0;
      if (block.reference) {
        stdx::where(valid, kl) = exp_terms(q).excess * V(limits.kl_coef) * weight;
        kl_sum.add(kl);
      }
      if (block.kept) {
        V v_gone = 0;
        stdx::where(gone && region, v_gone) = v;
        gone_sum.add(v_gone);
        stdx::where(gone, gone_count) += V(1);
        stdx::where(gone && region, gone_region_count) += V(1);
        V lowest = kInfinity;
        stdx::where(gone, lowest) = v;
        gone_min = stdx::min(gone_min, lowest);
      }
      if (loss_out) {
        const V loss = kl - settled_gain;
        for (int lane = 0; lane < kLanes && i + lane < n; ++lane) loss_out[begin + i + lane] = loss[lane];
      }
    }
  }

  if (keep_out)
    for (int i = 0; i < n; ++i) keep_out[begin + i] = block.valid[i] != 0;
  out->policy = 0.0 - gain_sum.total();
  out->kl = kl_sum.total();
  out->v_settled = settled_sum.total();
  out->v_gone = gone_sum.total();
  out->ratio = ratio_sum.total();
  out->excess = excess_sum.total();
  out->low_sum = settled_sum.rounded_total();
  out->first_bad = first_bad;
  // Counts of at most kBlock tokens: exact in Real.
  out->valid = static_cast<int32_t>(stdx::reduce(valid_count));
  out->region = static_cast<int32_t>(stdx::reduce(region_count));
  out->low = out->region - list->count - static_cast<int32_t>(stdx::reduce(gone_region_count));
  out->clipped = static_cast<int32_t>(stdx::reduce(clipped_count));
  out->gone = static_cast<int32_t>(stdx::reduce(gone_count));
  out->bad = bad_count;
  out->ratio_max = nan_ratio ? std::numeric_limits<Real>::quiet_NaN() : stdx::hmax(ratio_max);
  out->gone_min = stdx::hmin(gone_min);
}

template <class V, bool kPlain>
void backward(const Batch& batch, const Rule& rule, const Limits<typename V::value_type>& limits,
              const GradScale<typename V::value_type>& scale, typename V::value_type drop_above, int64_t begin, int n,
              const Source& out) {
  using Real = typename V::value_type;
  using Mask = typename V::mask_type;
  constexpr int kLanes = V::size();
  Block<Real> block(batch, begin, n, kLanes);
  alignas(64) Real scratch[kBlock + 16], factors[kBlock + 16];
  const Real* factor = nullptr;
  if constexpr (!kPlain) {
    if (scale.per_token.data) {
      factor = fetch(scale.per_token, batch.grid, begin, n, factors, false);
      for (int i = n; i < n + kLanes; ++i) factors[i] = 0;
    }
  }
  const bool direct = out.dtype == dtype_of<Real> && n % kLanes == 0 && is_flat(out, batch.grid, begin, n);
  Real* to = direct ? static_cast<Real*>(const_cast<void*>(out.data)) + begin / batch.grid.columns * out.row_stride +
                          begin % batch.grid.columns
                    : scratch;

  for (int i = 0; i < n; i += kLanes) {
    const V log_probs = load<V>(block.log_probs + i);
    const V d = log_probs - load<V>(block.behavior + i);
    const V advantage = load<V>(block.advantages + i);
    V q = 0;
    if constexpr (!kPlain)
      if (block.reference) q = load<V>(block.reference + i) - log_probs;
    Mask valid = load_mask<V>(block.valid + i);
    if (rule.nonfinite == Nonfinite::drop) valid = valid && !not_finite(d, advantage, q);
    const V v = d * d;
    Mask off = !valid || advantage == V(0);  // no policy gradient
    if constexpr (kPlain) {
      off = off || (in_quadrants(d, advantage) && v > V(drop_above));
    } else {
      if (rule.clip) {
        off = off || beyond_clip(d, advantage, limits);
      } else if (block.kept) {
        off = off || !load_mask<V>(block.kept + i);
      } else if (rule.scope_all) {
        off = off || v > V(drop_above);
      } else {
        off = off || (in_quadrants(d, advantage) && v > V(drop_above));
      }
      off = off || beyond_cap(d, advantage, limits);
    }
    V coefficient = -scale.policy;
    V weight = 1;
    if constexpr (!kPlain) {
      if (factor) coefficient = -load<V>(factor + i);
      if (block.weights) weight = load<V>(block.weights + i);
      coefficient *= weight;
    }
    V gradient = policy_gradient(exp_terms(d).ratio, advantage, coefficient, off);
    if constexpr (!kPlain) {
      if (block.reference) {
        V kl_coefficient = scale.kl;
        if (factor) kl_coefficient = load<V>(factor + i) * V(limits.kl_coef);
        gradient -= kl_gradient(exp_terms(q).minus_one, kl_coefficient, weight, valid);
      }
    }
    gradient.copy_to(to + i, stdx::element_aligned);
  }
  if (!direct) store(out, batch.grid, begin, n, scratch);
}

bool is_plain(const Batch& batch, const Rule& rule) {
  return !batch.ref_log_probs.data && !batch.weights.data && !batch.keep.data && !rule.scope_all && !rule.clip &&
         rule.ratio_cap == std::numeric_limits<double>::infinity();
}

template <class Real>
void sweep_block(const Batch& batch, const Rule& rule, const Limits<Real>& limits, int64_t begin, int n, BlockSums<Real>* sums,
                 Candidates<Real>* list, uint8_t* keep_out, Real* loss_out) {
  if (is_plain(batch, rule) && !loss_out) {
    sweep<VectorOf<Real>, true>(batch, rule, limits, begin, n, sums, list, keep_out, loss_out);
  } else {
    sweep<VectorOf<Real>, false>(batch, rule, limits, begin, n, sums, list, keep_out, loss_out);
  }
}

template <class Real>
void backward_block(const Batch& batch, const Rule& rule, const Limits<Real>& limits, const GradScale<Real>& scale,
                    Real drop_above, int64_t begin, int n, const Source& out) {
  if (is_plain(batch, rule) && !scale.per_token.data) {
    backward<VectorOf<Real>, true>(batch, rule, limits, scale, drop_above, begin, n, out);
  } else {
    backward<VectorOf<Real>, false>(batch, rule, limits, scale, drop_above, begin, n, out);
  }
}

}  // namespace
}  // namespace M2PO_ISA

extern const Kernels M2PO_CONCAT(kKernels_, M2PO_ISA);
const Kernels M2PO_CONCAT(kKernels_, M2PO_ISA) = {M2PO_STRING(M2PO_ISA), sweep_block<float>, sweep_block<double>,
                                                  backward_block<float>, backward_block<double>,
                                                  log_softmax_rows, log_softmax_backward_rows};

}  // namespace m2po
