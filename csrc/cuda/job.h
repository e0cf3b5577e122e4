// What a launch is told, and how its work is laid out. Torch-free and CUDA-free: the host side of both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "../core/cut.h"
#include "../core/host_device.h"
#include "../core/types.h"

namespace m2po {

inline constexpr int kWarp = 32;
inline constexpr int kPerLane = 8;  // consecutive tokens of one lane: 16 bytes of a 16-bit type, twice 16 bytes of fp32
inline constexpr int kTile = kWarp * kPerLane;
inline constexpr int64_t kMaxTokens = int64_t{1} << 31;  // what the exact sums hold, and 32-bit positions

// A tensor as a kernel reads or writes it. data == nullptr: not given.
struct View {
  const void* data = nullptr;
  int64_t row_stride = 0, column_stride = 0;  // in elements
  DType dtype = DType::f32;
  bool wide = false;  // a lane's tokens lie side by side, the first at a multiple of 16 bytes (8 for bytes)
};

struct Inputs {
  View log_probs, behavior, advantages, mask, reference, weights, keep;
  uint32_t tokens = 0, columns = 1;
};

struct Options {
  bool scope_all = false, clip = false, drop_bad = false;
  Limits<float> limits{};
};

// Words of the workspace that one block writes and all blocks read, an array over the blocks for each kind.
enum Kind : int {
  kLowSum, kRegion, kGoneRegion, kCandidates,  // int64 sums
  kCostLow, kCostHigh,                         // what all candidates cost, in two parts of kCostBits and more
  kValid, kClipped, kBad, kGone, kDropped,
  kFirstBad,  // smallest position
  kGoneMin,   // smallest bits
  kRatioMax,  // largest bits; a NaN is above all
  kPolicy, kKl, kVSettled, kVGone, kRatio, kExcess, kPolicyCandidates, kVCandidates, kPolicyKept, kVKept,  // fp64 sums
  kKinds
};
inline constexpr int kDecisive = kCostHigh + 1;  // kinds before this one say whether anything is dropped
inline constexpr int kCostBits = 48;             // sums of 2^16 warps fit a word

// The digits of v's bits below the sign: the first holds the exponent, so that the sum of a bin is one exact integer.
inline constexpr int kFirstBins = 2048, kNextBins = 1024, kNextBits = 10, kFirstShift = 20;

// Candidates of one value of a digit, over all blocks.
struct GlobalBin {
  unsigned long long count, mantissas;
};

// The workspace in global memory. Nothing in it is set before the launch.
struct Workspace {
  GlobalBin *first = nullptr, *second = nullptr, *third = nullptr;
  uint64_t* slots = nullptr;      // [kKinds][blocks]
  uint32_t* last_digits = nullptr;  // [blocks][kNextBins]: candidates of a block at each value of the third digit
  // Candidates that do not fit a warp's part of the shared memory; nullptr where all do. One place per token.
  float *list_v = nullptr, *list_term = nullptr;
  uint32_t* list_offset = nullptr;
};

enum class Output : int { keep = 0, loss = 1, per_token = 2 };

struct ForwardJob {
  Inputs in;
  Options options;
  Unit unit;
  float low_scale[2] = {0, 0};  // their product is 2^k: makes a low v an integer below 2^31
  Output output = Output::keep;
  View out;  // contiguous: one byte (keep) or one loss per token; or one loss
  Normalizer normalizer = Normalizer::valid;
  const double* denominators = nullptr;  // given, or nullptr
  int64_t denominators_stride = 0;
  double *scales = nullptr, *floats = nullptr;
  int64_t *cut = nullptr, *counts = nullptr;
  Workspace work;
  uint32_t list_room = 0;  // candidates of one warp that its part of the shared memory holds
};

struct BackwardJob {
  Inputs in;
  Options options;
  View grad;  // one for all (per_token false), or one per token
  bool per_token = false;
  const double* scales = nullptr;
  const int64_t* cut = nullptr;
  View out;
};

M2PO_SHARED int64_t tiles_of(int64_t tokens) { return (tokens + kTile - 1) / kTile; }

// How a forward launch is cut up.
struct Shape {
  int blocks = 1;
  uint32_t list_room = 0;  // candidates of a warp in shared memory
  bool overflows = false;  // a warp's tokens may outnumber list_room
};

// As many blocks as have a tile for each warp, at most `resident`, which run at the same time; no more shared memory than needed.
inline Shape cut_up(int64_t tokens, int resident, int threads, uint32_t list_room) {
  const int64_t tiles = tiles_of(tokens), warps = threads / kWarp;
  Shape shape;
  shape.blocks = static_cast<int>(std::clamp<int64_t>((tiles + warps - 1) / warps, 1, resident));
  const int64_t most = (tiles + shape.blocks * warps - 1) / (shape.blocks * warps) * kTile;
  shape.overflows = most > list_room;
  shape.list_room = shape.overflows ? list_room : static_cast<uint32_t>(most);
  return shape;
}

// Where the parts of the workspace begin, in bytes; `data` may be null to learn the size.
inline int64_t lay_out(Workspace* work, char* data, const Shape& shape, int64_t tokens) {
  int64_t used = 0;
  const auto take = [&](auto*& pointer, int64_t n) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(data + used);
    used += (n * static_cast<int64_t>(sizeof(*pointer)) + 15) / 16 * 16;
  };
  take(work->first, kFirstBins);
  take(work->second, kNextBins);
  take(work->third, kNextBins);
  take(work->slots, int64_t{kKinds} * shape.blocks);
  take(work->last_digits, int64_t{kNextBins} * shape.blocks);
  if (shape.overflows) {
    take(work->list_v, tokens);
    take(work->list_term, tokens);
    take(work->list_offset, tokens);
  }
  return used;
}

}  // namespace m2po
