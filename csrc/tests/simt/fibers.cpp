#include "fibers.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {
namespace {

constexpr int kWarp = 32;
constexpr size_t kStack = size_t{1} << 18;

[[noreturn]] void fail(const char* what, const Place& place) {
  std::fprintf(stderr, "simt: %s at %s:%u\n", what, place.file_name(), static_cast<unsigned>(place.line()));
  std::abort();
}

struct Fiber;

// Where a set of threads waits for all of its members.
struct Meeting {
  int members = 0;
  Place place;
  std::vector<Fiber*> here;
};

struct Warp {
  Meeting meeting;
  uint64_t words[2][kWarp] = {};  // two turns: a lane may give the next word before another has read the last
  int turn[kWarp] = {};
  std::deque<Fiber*> ready;
  bool listed = false;  // in Machine::lively
};

struct Block {
  Meeting meeting;
  std::unique_ptr<char[]> shared;
};

struct Fiber {
  ucontext_t context;
  const void* stack = nullptr;
  size_t stack_size = kStack;
  void* fake_stack = nullptr;  // AddressSanitizer's
  int thread = 0, block = 0;
  Warp* warp = nullptr;
  bool done = false;
  const Place* waits_at = nullptr;
};

struct Machine {
  Launch launch;
  const std::function<void()>* kernel = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Block> blocks;
  Meeting grid;
  std::deque<Fiber*> ready;  // in order 0: who can go on, the first first
  std::vector<Warp*> lively;  // else: warps that may have somebody who can
  std::mt19937 random;
  Fiber main;
  Fiber* now = nullptr;
};

Machine* machine = nullptr;

void switch_to(Fiber& next) {
  Fiber& last = *machine->now;
  machine->now = &next;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last.done ? nullptr : &last.fake_stack, next.stack, next.stack_size);
#endif
  swapcontext(&last.context, &next.context);
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(last.fake_stack, &bottom, &size);
#endif
}

void make_ready(Fiber* fiber) {
  Machine& m = *machine;
  if (m.launch.order == 0) {
    m.ready.push_back(fiber);
    return;
  }
  Warp& warp = *fiber->warp;
  warp.ready.push_back(fiber);
  if (!warp.listed) m.lively.push_back(&warp);
  warp.listed = true;
}

Fiber* first_of(std::deque<Fiber*>& ready) {
  Fiber* const first = ready.front();
  ready.pop_front();
  return first;
}

// Who goes on, null if nobody can. In an order that is not 0 a warp runs on as long as it can, up to a meeting with others that are
// not there yet: as far ahead of them as a missing barrier would ever let it.
Fiber* next_ready() {
  Machine& m = *machine;
  if (m.launch.order == 0) return m.ready.empty() ? nullptr : first_of(m.ready);
  if (m.now->warp != nullptr && !m.now->warp->ready.empty()) return first_of(m.now->warp->ready);
  while (!m.lively.empty()) {
    Warp*& any = m.lively[m.random() % m.lively.size()];
    if (!any->ready.empty()) return first_of(any->ready);
    any->listed = false;
    any = m.lively.back();
    m.lively.pop_back();
  }
  return nullptr;
}

// To the next thread that can go on; to the main one when there is none.
void pass_on() {
  Fiber* const next = next_ready();
  if (next == nullptr) {
    switch_to(machine->main);
  } else if (next != machine->now) {
    switch_to(*next);
  }
}

void wait(Meeting& meeting, const Place& place) {
  Machine& m = *machine;
  if (meeting.here.empty()) {
    meeting.place = place;
  } else if (meeting.place.line() != place.line() || std::strcmp(meeting.place.file_name(), place.file_name()) != 0) {
    fail("threads that should meet here wait elsewhere", place);
  }
  meeting.here.push_back(m.now);
  if (static_cast<int>(meeting.here.size()) == meeting.members) {
    if (m.launch.order != 0) std::shuffle(meeting.here.begin(), meeting.here.end(), m.random);
    for (Fiber* fiber : meeting.here) make_ready(fiber);
    meeting.here.clear();
  }
  m.now->waits_at = &place;
  pass_on();
  machine->now->waits_at = nullptr;
}

void enter() {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  if (machine->main.stack == nullptr) {  // the first one comes from there
    machine->main.stack = bottom;
    machine->main.stack_size = size;
  }
#endif
  (*machine->kernel)();
  machine->now->done = true;
  pass_on();
}

}  // namespace

void run(const Launch& launch, const std::function<void()>& kernel) {
  Machine m;
  m.launch = launch;
  m.kernel = &kernel;
  m.random.seed(launch.order);
  const int n = launch.blocks * launch.threads;
  m.fibers.resize(static_cast<size_t>(n));
  m.warps.resize(static_cast<size_t>(n / kWarp));
  m.blocks.resize(static_cast<size_t>(launch.blocks));
  m.grid.members = n;
  for (Warp& warp : m.warps) warp.meeting.members = kWarp;
  for (Block& block : m.blocks) {
    block.meeting.members = launch.threads;
    block.shared = std::make_unique<char[]>(static_cast<size_t>(launch.shared_bytes));  // the exact size: see AddressSanitizer
    std::memset(block.shared.get(), 0xc5, static_cast<size_t>(launch.shared_bytes));
  }
  machine = &m;
  m.now = &m.main;
  const size_t all = static_cast<size_t>(n) * kStack;
  char* const stacks =
      static_cast<char*>(mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) fail("no memory for stacks", Place::current());
  std::vector<Fiber*> threads;
  for (int i = 0; i < n; ++i) {
    Fiber& fiber = m.fibers[static_cast<size_t>(i)];
    fiber.thread = i % launch.threads;
    fiber.block = i / launch.threads;
    fiber.warp = &m.warps[static_cast<size_t>(i / kWarp)];
    char* const stack = stacks + static_cast<size_t>(i) * kStack;
    fiber.stack = stack;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
    threads.push_back(&fiber);
  }
  if (launch.order != 0) std::shuffle(threads.begin(), threads.end(), m.random);
  for (Fiber* fiber : threads) make_ready(fiber);
  pass_on();
  for (const Fiber& fiber : m.fibers)
    if (!fiber.done) fail("threads wait for others that never come", fiber.waits_at ? *fiber.waits_at : Place::current());
  munmap(stacks, all);
  machine = nullptr;
}

int thread() { return machine->now->thread; }
int block() { return machine->now->block; }
int blocks() { return machine->launch.blocks; }
char* shared_memory() { return machine->blocks[static_cast<size_t>(machine->now->block)].shared.get(); }

void sync_warp(Place place) { wait(machine->now->warp->meeting, place); }
void sync_block(Place place) { wait(machine->blocks[static_cast<size_t>(machine->now->block)].meeting, place); }
void sync_grid(Place place) { wait(machine->grid, place); }

const uint64_t* exchange(uint64_t word, Place place) {
  Warp& warp = *machine->now->warp;
  const int lane = machine->now->thread % kWarp;
  const int turn = warp.turn[lane] ^= 1;
  warp.words[turn][lane] = word;
  wait(warp.meeting, place);
  return warp.words[turn];
}

}  // namespace simt
