// Registration of the CUDA kernels with libtorch's stable ABI: tensors to jobs. No arithmetic here.
//
// With M2PO_SIMT the same ops are registered for tensors on a CPU, and the kernels run on the host (csrc/tests/simt): for tests.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#if !defined(M2PO_SIMT)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

#include <string>
#include <vector>

#include "arguments.h"
#include "cuda/launch.h"
#include "cuda/prepare.h"

namespace {

using m2po::MaybeTensor;
using m2po::source_of;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#if defined(M2PO_SIMT)
#define M2PO_DISPATCH_KEY CPU
struct OnDeviceOf {
  explicit OnDeviceOf(const Tensor&) {}
  void* stream = nullptr;
};
#else
#define M2PO_DISPATCH_KEY CUDA
// Makes the tensor's device the current one while it lives; `stream` is torch's current stream there.
struct OnDeviceOf {
  explicit OnDeviceOf(const Tensor& tensor) : guard(tensor.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  }
  torch::stable::accelerator::DeviceGuard guard;
  void* stream = nullptr;
};
#endif

template <class T>
T* data_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Contiguous outputs, made by cuda.py, of which one of the first three is given: keep [tokens] bool; per_token [tokens] and loss
// [1] fp32; scales [2], floats [9] fp64; cut [2], counts [7] int64.
void forward(const Tensor& log_probs, const Tensor& behavior_log_probs, const Tensor& advantages, const Tensor& mask,
             const MaybeTensor& ref_log_probs, const MaybeTensor& weights, const MaybeTensor& keep, const MaybeTensor& denominators,
             const std::vector<double>& scalars, const std::vector<int64_t>& flags, const MaybeTensor& keep_out,
             const MaybeTensor& per_token, const MaybeTensor& loss, const Tensor& scales, const Tensor& cut, const Tensor& counts,
             const Tensor& floats) {
  const OnDeviceOf device(log_probs);
  const auto batch = m2po::batch_of(log_probs, behavior_log_probs, advantages, mask, ref_log_probs, weights, keep);
  m2po::ForwardJob job = m2po::forward_job(batch, m2po::rule_of(scalars, flags));
  job.output = keep_out ? m2po::Output::keep : per_token ? m2po::Output::per_token : m2po::Output::loss;
  const Tensor& out = keep_out ? *keep_out : per_token ? *per_token : *loss;
  const m2po::Grid& grid = batch.grid;
  job.out = m2po::view_of({out.mutable_data_ptr(), m2po::dtype_of(out), grid.columns, 1}, grid);
  if (denominators) {
    job.denominators = static_cast<const double*>(denominators->const_data_ptr());
    job.denominators_stride = denominators->stride(0);
  }
  job.scales = data_of<double>(scales);
  job.floats = data_of<double>(floats);
  job.cut = data_of<int64_t>(cut);
  job.counts = data_of<int64_t>(counts);
  const m2po::Shape shape = m2po::shape_of(job);
  job.list_room = shape.list_room;
  const int64_t bytes = m2po::lay_out(&job.work, nullptr, shape, grid.tokens());
  const Tensor work = torch::stable::new_empty(scales, {bytes}, ScalarType::Byte);
  m2po::lay_out(&job.work, data_of<char>(work), shape, grid.tokens());
  m2po::launch(job, shape, device.stream);
}

// grad_loss: one, or one per token of any strides. `out`: shape and dtype of log_probs, any strides.
void backward(const Tensor& grad_loss, const Tensor& scales, const Tensor& cut, const Tensor& log_probs,
              const Tensor& behavior_log_probs, const Tensor& advantages, const Tensor& mask, const MaybeTensor& ref_log_probs,
              const MaybeTensor& weights, const MaybeTensor& keep, const std::vector<double>& scalars,
              const std::vector<int64_t>& flags, const Tensor& out) {
  const OnDeviceOf device(log_probs);
  const auto batch = m2po::batch_of(log_probs, behavior_log_probs, advantages, mask, ref_log_probs, weights, keep);
  m2po::BackwardJob job = m2po::backward_job(batch, m2po::rule_of(scalars, flags));
  job.per_token = grad_loss.dim() > 0;
  job.grad = job.per_token ? m2po::view_of(source_of(grad_loss), batch.grid) : m2po::View{.data = grad_loss.const_data_ptr()};
  job.scales = static_cast<const double*>(scales.const_data_ptr());
  job.cut = static_cast<const int64_t*>(cut.const_data_ptr());
  job.out = m2po::view_of(source_of(out), batch.grid);
  m2po::launch(job, device.stream);
}

// On the device and stream of `on`.
void empty_launch(const Tensor& on, int64_t tokens, int64_t grid_syncs) {
  const OnDeviceOf device(on);
  m2po::launch_empty(tokens, static_cast<int>(grid_syncs), device.stream);
}

std::string why_not(int64_t device) { return m2po::why_not(static_cast<int>(device)); }

}  // namespace

STABLE_TORCH_LIBRARY(m2po_cuda, m) {
  m.def(
      "forward(Tensor log_probs, Tensor behavior_log_probs, Tensor advantages, Tensor mask, Tensor? ref_log_probs, "
      "Tensor? weights, Tensor? keep, Tensor? denominators, float[] scalars, int[] flags, Tensor(a!)? keep_out, "
      "Tensor(b!)? per_token, Tensor(c!)? loss, Tensor(d!) scales, Tensor(e!) cut, Tensor(f!) counts, Tensor(g!) floats) -> ()");
  m.def(
      "backward(Tensor grad_loss, Tensor scales, Tensor cut, Tensor log_probs, Tensor behavior_log_probs, Tensor advantages, "
      "Tensor mask, Tensor? ref_log_probs, Tensor? weights, Tensor? keep, float[] scalars, int[] flags, Tensor(a!) out) -> ()");
  m.def("empty_launch(Tensor on, int tokens, int grid_syncs) -> ()");
  m.def("why_not(int device) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(m2po_cuda, M2PO_DISPATCH_KEY, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("empty_launch", TORCH_BOX(&empty_launch));
}

STABLE_TORCH_LIBRARY_IMPL(m2po_cuda, CompositeExplicitAutograd, m) { m.impl("why_not", TORCH_BOX(&why_not)); }
