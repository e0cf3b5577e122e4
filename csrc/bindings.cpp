// Registration with libtorch's stable ABI, and the translation of its tensors. No arithmetic here.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "core/cut.h"
#include "cpu/driver.h"
#include "cpu/isa.h"

namespace {

using m2po::MaybeTensor;
using m2po::dtype_of;
using m2po::rule_of;
using m2po::source_of;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

class TorchThreads final : public m2po::Parallel {
 public:
  void run(int64_t n, int64_t grain, Body body, void* context) const override {
    torch::stable::parallel_for(0, n, grain, [=](int64_t begin, int64_t end) { body(context, begin, end); });
  }
};

template <class Real>
void sweep_as(const m2po::Batch& batch, const m2po::Rule& rule, const double* denominators, uint8_t* keep_out, void* per_token,
              void* loss, double* scales, int64_t* cut, int64_t* counts, double* floats) {
  const auto result = m2po::sweep<Real>(batch, rule, denominators, keep_out, static_cast<Real*>(per_token), TorchThreads());
  if (loss) *static_cast<Real*>(loss) = static_cast<Real>(result.loss);
  std::memcpy(scales, result.scales.data(), sizeof result.scales);
  cut[0] = static_cast<int64_t>(m2po::to_bits(result.cut.value));
  cut[1] = result.cut.position;
  std::memcpy(counts, result.statistics.counts.data(), sizeof result.statistics.counts);
  std::memcpy(floats, result.statistics.floats.data(), sizeof result.statistics.floats);
}

// Contiguous outputs, made by native.py: keep_out [tokens] bool; per_token [tokens] and loss [1] in the type of d; scales [2],
// floats [9] fp64; cut [2], counts [7] int64.
void sweep(const Tensor& log_probs, const Tensor& behavior_log_probs, const Tensor& advantages, const Tensor& mask,
           const MaybeTensor& ref_log_probs, const MaybeTensor& weights, const MaybeTensor& keep, const MaybeTensor& denominators,
           const std::vector<double>& scalars, const std::vector<int64_t>& flags, const MaybeTensor& keep_out,
           const MaybeTensor& per_token, const MaybeTensor& loss, const Tensor& scales, const Tensor& cut, const Tensor& counts,
           const Tensor& floats) {
  const auto batch = m2po::batch_of(log_probs, behavior_log_probs, advantages, mask, ref_log_probs, weights, keep);
  std::array<double, 2> given{};
  if (denominators) {
    const auto* data = static_cast<const double*>(denominators->const_data_ptr());
    given = {data[0], data[denominators->stride(0)]};
  }
  const auto data = [](const MaybeTensor& tensor) { return tensor ? tensor->mutable_data_ptr() : nullptr; };
  const auto run = log_probs.scalar_type() == ScalarType::Double ? sweep_as<double> : sweep_as<float>;
  run(batch, rule_of(scalars, flags), denominators ? given.data() : nullptr, static_cast<uint8_t*>(data(keep_out)), data(per_token),
      data(loss), static_cast<double*>(scales.mutable_data_ptr()), static_cast<int64_t*>(cut.mutable_data_ptr()),
      static_cast<int64_t*>(counts.mutable_data_ptr()), static_cast<double*>(floats.mutable_data_ptr()));
}

template <class Real>
void backward_as(const m2po::Batch& batch, const m2po::Rule& rule, double grad_loss, const m2po::Source& per_token,
                 const std::array<double, 2>& scales, const int64_t* cut, const m2po::Source& out) {
  const m2po::Cut<Real> at{m2po::from_bits<Real>(static_cast<typename m2po::Bits<Real>::Int>(cut[0])), cut[1]};
  m2po::backward<Real>(batch, rule, grad_loss, per_token, scales, at, out, TorchThreads());
}

void backward(const Tensor& grad_loss, const Tensor& scales, const Tensor& cut, const Tensor& log_probs,
              const Tensor& behavior_log_probs, const Tensor& advantages, const Tensor& mask, const MaybeTensor& ref_log_probs,
              const MaybeTensor& weights, const MaybeTensor& keep, const std::vector<double>& scalars,
              const std::vector<int64_t>& flags, const Tensor& out) {
  const auto batch = m2po::batch_of(log_probs, behavior_log_probs, advantages, mask, ref_log_probs, weights, keep);
  const bool wide = log_probs.scalar_type() == ScalarType::Double;
  double whole = 0;
  m2po::Source per_token;
  if (grad_loss.dim() == 0) {
    whole = wide ? *static_cast<const double*>(grad_loss.const_data_ptr()) : *static_cast<const float*>(grad_loss.const_data_ptr());
  } else {
    per_token = source_of(grad_loss);
  }
  const auto* s = static_cast<const double*>(scales.const_data_ptr());
  const auto run = wide ? backward_as<double> : backward_as<float>;
  if (out.is_contiguous()) m2po::advise_huge(out.mutable_data_ptr(), out.numel() * static_cast<int64_t>(out.element_size()));
  run(batch, rule_of(scalars, flags), whole, per_token, {s[0], s[1]}, static_cast<const int64_t*>(cut.const_data_ptr()),
      source_of(out));
}

template <class T>
m2po::PerRow<T> per_row(const Tensor& tensor) {
  return {static_cast<T*>(tensor.mutable_data_ptr()), tensor.stride(0), tensor.stride(1)};
}
template <class T>
m2po::PerRow<T> per_row(const MaybeTensor& tensor) {
  return tensor ? per_row<T>(*tensor) : m2po::PerRow<T>{};
}

// `scalars`: temperature, logit_scale, logit_softcap. token_ids int64 [B, T], the shift already taken off.
m2po::LogitsJob logits_job(const Tensor& logits, const Tensor& token_ids, const MaybeTensor& temperatures,
                           const std::vector<double>& scalars, int64_t vocab_size) {
  m2po::LogitsJob job;
  job.logits = per_row<const void>(logits);
  job.dtype = dtype_of(logits);
  job.batches = token_ids.size(0);
  job.rows = token_ids.size(1);
  job.shift = logits.size(1) - job.rows;
  job.vocab = vocab_size;
  job.width = logits.size(2);
  job.ids = per_row<const int64_t>(token_ids);
  job.temperatures = per_row<const float>(temperatures);
  job.temperature = static_cast<float>(scalars[0]);
  job.scale = static_cast<float>(scalars[1]);
  job.softcap = static_cast<float>(scalars[2]);
  return job;
}

void log_softmax(const Tensor& logits, const Tensor& token_ids, const MaybeTensor& temperatures, const std::vector<double>& scalars,
                 int64_t vocab_size, const Tensor& log_probs, const MaybeTensor& entropy) {
  m2po::log_softmax(logits_job(logits, token_ids, temperatures, scalars, vocab_size), per_row<float>(log_probs),
                    per_row<float>(entropy), TorchThreads());
}

void log_softmax_backward(const Tensor& logits, const Tensor& token_ids, const MaybeTensor& temperatures,
                          const std::vector<double>& scalars, int64_t vocab_size, const Tensor& log_probs,
                          const Tensor& grad_log_probs, const MaybeTensor& entropy, const MaybeTensor& grad_entropy,
                          const Tensor& out) {
  const m2po::LogitsGrad grad{per_row<const float>(log_probs), per_row<const float>(grad_log_probs), per_row<const float>(entropy),
                              per_row<const float>(grad_entropy)};
  m2po::log_softmax_backward(logits_job(logits, token_ids, temperatures, scalars, vocab_size), grad, per_row<void>(out),
                             TorchThreads());
}

// The usable ISAs, best first, joined by commas.
std::string isas() {
  std::string joined;
  for (const auto& name : m2po::usable_isas()) joined += (joined.empty() ? "" : ",") + name;
  return joined;
}

bool use_isa(const std::string& isa) { return m2po::use_isa(isa); }

}  // namespace

STABLE_TORCH_LIBRARY(m2po_native, m) {
  m.def(
      "sweep(Tensor log_probs, Tensor behavior_log_probs, Tensor advantages, Tensor mask, Tensor? ref_log_probs, Tensor? weights, "
      "Tensor? keep, Tensor? denominators, float[] scalars, int[] flags, Tensor(a!)? keep_out, Tensor(b!)? per_token, "
      "Tensor(c!)? loss, Tensor(d!) scales, Tensor(e!) cut, Tensor(f!) counts, Tensor(g!) floats) -> ()");
  m.def(
      "backward(Tensor grad_loss, Tensor scales, Tensor cut, Tensor log_probs, Tensor behavior_log_probs, Tensor advantages, "
      "Tensor mask, Tensor? ref_log_probs, Tensor? weights, Tensor? keep, float[] scalars, int[] flags, Tensor(a!) out) -> ()");
  m.def(
      "log_softmax(Tensor logits, Tensor token_ids, Tensor? temperatures, float[] scalars, int vocab_size, Tensor(a!) log_probs, "
      "Tensor(b!)? entropy) -> ()");
  m.def(
      "log_softmax_backward(Tensor logits, Tensor token_ids, Tensor? temperatures, float[] scalars, int vocab_size, "
      "Tensor log_probs, Tensor grad_log_probs, Tensor? entropy, Tensor? grad_entropy, Tensor(a!) out) -> ()");
  m.def("isas() -> str");
  m.def("use_isa(str isa) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(m2po_native, CPU, m) {
  m.impl("sweep", TORCH_BOX(&sweep));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("log_softmax", TORCH_BOX(&log_softmax));
  m.impl("log_softmax_backward", TORCH_BOX(&log_softmax_backward));
}

STABLE_TORCH_LIBRARY_IMPL(m2po_native, CompositeExplicitAutograd, m) {
  m.impl("isas", TORCH_BOX(&isas));
  m.impl("use_isa", TORCH_BOX(&use_isa));
}
