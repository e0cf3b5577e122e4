// A grid of threads on one host thread: each thread of each block is a fiber, and fibers change places only where a kernel waits
// for others (a barrier, a vote, a shuffle). So kernels run as written, under any sanitizer, and a meeting that not all come to
// is found and named instead of hanging.
#pragma once

#include <cstdint>
#include <functional>
#include <source_location>
#include <vector>

namespace simt {

using Place = std::source_location;

struct Launch {
  int blocks = 1, threads = 32;  // threads of a block: a multiple of 32
  int64_t shared_bytes = 0;
  // In which order threads run between two meetings: by number; or, with this seed, a warp as far as it can go before any other,
  // its lanes shuffled. A result that depends on it shows a barrier that is missing.
  uint32_t order = 0;
};

// Runs `kernel` once for each thread of the grid. Ends the process with a message if threads wait for each other for ever, or
// if lanes of a warp meet at different places.
void run(const Launch& launch, const std::function<void()>& kernel);

// Of the thread that runs now.
int thread();
int block();
int blocks();
char* shared_memory();  // of its block; filled with a pattern at first

void sync_warp(Place place = Place::current());
void sync_block(Place place = Place::current());
void sync_grid(Place place = Place::current());

// Gives `word` to the other lanes of the warp and returns what all 32 gave; valid until the next exchange.
const uint64_t* exchange(uint64_t word, Place place = Place::current());

}  // namespace simt
