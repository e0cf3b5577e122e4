// Tensors and lists as the ops of the extension get them, to what the kernels take.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/types.h"

namespace m2po {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::Bool:
    case ScalarType::Byte:
    case ScalarType::Char:
      return DType::u8;
    case ScalarType::Short:
      return DType::i16;
    case ScalarType::Int:
      return DType::i32;
    case ScalarType::Long:
      return DType::i64;
    default:
      STD_TORCH_CHECK(false, "m2po_kernels: unexpected dtype ", torch::headeronly::toString(tensor.scalar_type()));
  }
}

inline Source source_of(const Tensor& tensor) {
  const bool matrix = tensor.dim() == 2;
  return {tensor.const_data_ptr(), dtype_of(tensor), matrix ? tensor.stride(0) : 0, tensor.stride(matrix ? 1 : 0)};
}

inline Source source_of(const MaybeTensor& tensor) { return tensor ? source_of(*tensor) : Source{}; }

inline Batch batch_of(const Tensor& log_probs, const Tensor& behavior_log_probs, const Tensor& advantages,
                      const Tensor& mask, const MaybeTensor& ref_log_probs, const MaybeTensor& weights, const MaybeTensor& keep) {
  const bool matrix = log_probs.dim() == 2;
  return {{matrix ? log_probs.size(0) : 1, log_probs.size(matrix ? 1 : 0)},
          source_of(log_probs),
          source_of(behavior_log_probs),
          source_of(advantages),
          source_of(mask),
          source_of(ref_log_probs),
          source_of(weights),
          source_of(keep)};
}

// `scalars` and `flags` as m2po_kernels.rule.Rule.args() packs them (the last flag is of no concern here).
inline Rule rule_of(const std::vector<double>& scalars, const std::vector<int64_t>& flags) {
  STD_TORCH_CHECK(scalars.size() == 5 && flags.size() == 5, "m2po_kernels: the extension and the package are of different versions");
  return {.m2_threshold = scalars[0],
          .scope_all = flags[0] != 0,
          .clip = flags[1] != 0,
          .clip_low = scalars[1],
          .clip_high = scalars[2],
          .kl_coef = scalars[3],
          .ratio_cap = scalars[4],
          .nonfinite = static_cast<Nonfinite>(flags[2]),
          .normalizer = static_cast<Normalizer>(flags[3])};
}

}  // namespace m2po
