#include "launch.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "backward.cuh"
#include "forward.cuh"
#include "prepare.h"

namespace m2po {
namespace {

constexpr int kMaxDevices = 64;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next call of someone else would report it
  throw std::runtime_error(std::string("m2po_kernels: ") + what + ": " + cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

// What the driver says of a device does not change: asked once.
struct Facts {
  std::atomic<int> resident{0};  // blocks of one forward kernel that run at the same time
  std::atomic<int> multiprocessors{0}, arch{0};
};

template <bool kPlain>
Facts& facts_of(int device) {
  static Facts facts[kMaxDevices];
  if (device >= kMaxDevices) throw std::runtime_error("m2po_kernels: more than 64 devices");
  Facts& mine = facts[device];
  if (mine.resident.load(std::memory_order_acquire) == 0) {
    const auto kernel = forward_kernel<kThreadsPerBlock, kPlain>;
    const int arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
    const int units = attribute(cudaDevAttrMultiProcessorCount, device);
    const int shared = static_cast<int>(shared_bytes_of<kThreadsPerBlock>(list_room_of(arch)));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
    int per_unit = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_unit, kernel, kThreadsPerBlock, shared), "occupancy");
    if (per_unit == 0) throw std::runtime_error("m2po_kernels: no block of the forward kernel fits a multiprocessor");
    mine.arch.store(arch, std::memory_order_relaxed);
    mine.multiprocessors.store(units, std::memory_order_relaxed);
    mine.resident.store(per_unit * units, std::memory_order_release);
  }
  return mine;
}

std::string version(int number) { return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10); }

// What a forward launch costs before it does anything: the same grid, which meets `times` times.
__global__ void __launch_bounds__(kThreadsPerBlock) meet(int times) {
  for (int i = 0; i < times; ++i) cooperative_groups::this_grid().sync();
}

// Why this device cannot run what was compiled; empty if it can.
std::string no_code_for(int device) {
  int before = 0;
  check(cudaGetDevice(&before), "cudaGetDevice");
  check(cudaSetDevice(device), "cudaSetDevice");
  cudaFuncAttributes attributes;
  const cudaError_t found = cudaFuncGetAttributes(&attributes, forward_kernel<kThreadsPerBlock, true>);
  cudaGetLastError();  // else the next call of someone else would report it
  check(cudaSetDevice(before), "cudaSetDevice");
  return found == cudaSuccess ? "" : std::string("the library has no code for this device: ") + cudaGetErrorString(found);
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

template <bool kPlain>
Shape shape_as(int64_t tokens) {
  const Facts& facts = facts_of<kPlain>(current_device());
  return cut_up(tokens, facts.resident, kThreadsPerBlock, list_room_of(facts.arch));
}

template <class Job>
void enqueue(void (*kernel)(Job), const Job& job, int blocks, int64_t shared, void* stream, bool cooperative) {
  cudaLaunchAttribute attributes[1];
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreadsPerBlock);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = cooperative ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, job), "launch");
}

}  // namespace

Shape shape_of(const ForwardJob& job) {
  const bool plain = is_plain(job);
  return plain ? shape_as<true>(job.in.tokens) : shape_as<false>(job.in.tokens);
}

void launch(const ForwardJob& job, const Shape& shape, void* stream) {
  const bool plain = is_plain(job);
  const auto kernel = plain ? forward_kernel<kThreadsPerBlock, true> : forward_kernel<kThreadsPerBlock, false>;
  enqueue(kernel, job, shape.blocks, shared_bytes_of<kThreadsPerBlock>(shape.list_room), stream, true);
}

void launch(const BackwardJob& job, void* stream) {
  if (job.in.tokens == 0) return;
  const bool plain = is_plain(job);
  const auto kernel = plain ? backward_kernel<kThreadsPerBlock, true> : backward_kernel<kThreadsPerBlock, false>;
  const int64_t wanted = (tiles_of(job.in.tokens) * kWarp + kThreadsPerBlock - 1) / kThreadsPerBlock;
  enqueue(kernel, job, static_cast<int>(wanted), 0, stream, false);
}

void launch_empty(int64_t tokens, int grid_syncs, void* stream) {
  enqueue(meet, grid_syncs, shape_as<true>(tokens).blocks, 0, stream, true);
}

std::string why_not(int device) {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "there is no CUDA driver on this machine";
  // Within a major version a driver runs what a newer toolkit compiled.
  if (driver / 1000 < CUDART_VERSION / 1000)
    return "the driver serves CUDA up to " + version(driver) + ", and the kernels were built for " + version(CUDART_VERSION);
  try {
    const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
    if (major < 8) return "the kernels need compute capability 8.0, and this device has " + std::to_string(major);
    if (!attribute(cudaDevAttrCooperativeLaunch, device)) return "this device has no cooperative launches";
    return no_code_for(device);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

}  // namespace m2po
