#include "isa.h"

#include <atomic>

namespace m2po {

extern const Kernels kKernels_baseline;
#if defined(__x86_64__)
extern const Kernels kKernels_avx2;
extern const Kernels kKernels_avx512;
#endif

namespace {

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
    found.push_back(&kKernels_avx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&kKernels_avx2);
#endif
  found.push_back(&kKernels_baseline);
  return found;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> kernels{usable().front()};
  return kernels;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

std::vector<std::string> usable_isas() {
  std::vector<std::string> names;
  for (const Kernels* k : usable()) names.emplace_back(k->isa);
  return names;
}

bool use_isa(const std::string& isa) {
  for (const Kernels* k : usable()) {
    if (isa == k->isa) {
      current().store(k, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

}  // namespace m2po
