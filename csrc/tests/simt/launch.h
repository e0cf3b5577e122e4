// How the host runs the launches of csrc/cuda/launch.h: which grid, which block, in which order the threads.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

namespace simt {

struct Settings {
  int threads = 64;  // of a block: 32, 64, 128 or 256
  int resident = 3;  // blocks of the largest grid
  uint32_t list_room = 32;
  uint32_t order = 0;  // see fibers.h
};

Settings& settings();

}  // namespace simt
