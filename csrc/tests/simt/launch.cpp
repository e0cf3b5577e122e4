#include "launch.h"

#include <algorithm>
#include <stdexcept>

#include "cuda/backward.cuh"
#include "cuda/forward.cuh"
#include "cuda/prepare.h"
#include "fibers.h"

namespace simt {

Settings& settings() {
  static Settings settings;
  return settings;
}

}  // namespace simt

namespace m2po {
namespace {

// Calls f with the number of threads of a block as a constant.
template <class F>
void with_threads(F f) {
  switch (simt::settings().threads) {
    case 32:
      return f(std::integral_constant<int, 32>());
    case 64:
      return f(std::integral_constant<int, 64>());
    case 128:
      return f(std::integral_constant<int, 128>());
    case 256:
      return f(std::integral_constant<int, 256>());
    default:
      throw std::invalid_argument("simt: threads must be 32, 64, 128 or 256");
  }
}

}  // namespace

Shape shape_of(const ForwardJob& job) {
  const auto& settings = simt::settings();
  return cut_up(job.in.tokens, settings.resident, settings.threads, settings.list_room);
}

void launch(const ForwardJob& job, const Shape& shape, void*) {
  const bool plain = is_plain(job);
  with_threads([&](auto threads) {
    const auto kernel = plain ? forward_kernel<threads(), true> : forward_kernel<threads(), false>;
    const simt::Launch grid{shape.blocks, threads(), shared_bytes_of<threads()>(shape.list_room), simt::settings().order};
    simt::run(grid, [&] { kernel(job); });
  });
}

void launch(const BackwardJob& job, void*) {
  if (job.in.tokens == 0) return;
  with_threads([&](auto threads) {
    const auto kernel = is_plain(job) ? backward_kernel<threads(), true> : backward_kernel<threads(), false>;
    const int64_t wanted = (tiles_of(job.in.tokens) * kWarp + threads() - 1) / threads();
    const int blocks = static_cast<int>(std::min<int64_t>(wanted, simt::settings().resident));
    simt::run({blocks, threads(), 0, simt::settings().order}, [&] { kernel(job); });
  });
}

void launch_empty(int64_t, int, void*) {}

std::string why_not(int) { return ""; }

}  // namespace m2po
