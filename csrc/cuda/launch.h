// From a job to a launch. launch.cu has the GPU's version, csrc/tests/simt/launch.cpp the host's.
#pragma once

#include <string>

#include "job.h"

namespace m2po {

// How a forward launch on the current device is cut up.
Shape shape_of(const ForwardJob& job);

// Both enqueue on `stream` (a cudaStream_t) of the current device and wait for nothing. Throw std::runtime_error with CUDA's own
// message if the launch is refused.
void launch(const ForwardJob& job, const Shape& shape, void* stream);
void launch(const BackwardJob& job, void* stream);

// For benchmarks: the grid of a plain forward launch over `tokens`, that does nothing but meet `grid_syncs` times.
void launch_empty(int64_t tokens, int grid_syncs, void* stream);

// Empty if the kernels run on this device, else the reason.
std::string why_not(int device);

}  // namespace m2po
