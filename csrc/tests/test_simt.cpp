// The host version of a grid of threads: that it runs them all, keeps the meetings, and finds the mistakes it is there to find.
#include "simt/platform.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace {

namespace gpu = m2po::gpu;

TEST(Simt, EveryThreadOfEveryBlockRunsOnce) {
  std::vector<int> seen(3 * 64);
  simt::run({3, 64, 0, 0}, [&] { ++seen[static_cast<size_t>(gpu::block() * 64 + gpu::thread())]; });
  for (const int n : seen) EXPECT_EQ(n, 1);
}

TEST(Simt, VotesShufflesAndSumsAreThoseOfAWarp) {
  simt::run({1, 64, 0, 3}, [] {
    const int lane = gpu::thread() % 32, warp = gpu::thread() / 32;
    EXPECT_EQ(gpu::ballot(lane % 3 == warp), warp ? 0x92492492u : 0x49249249u);
    EXPECT_EQ(gpu::from_lane(lane * 10, 7), 70);
    EXPECT_EQ(gpu::from_below(double(lane), 4), lane < 4 ? lane : lane - 4);
    EXPECT_EQ(gpu::from_across(lane, 5), lane ^ 5);
    EXPECT_EQ(gpu::warp_sum(static_cast<uint32_t>(lane)), 496u);
    EXPECT_EQ(gpu::warp_max(static_cast<uint32_t>(lane)), 31u);
    EXPECT_EQ(gpu::warp_min(static_cast<uint32_t>(lane + warp)), static_cast<uint32_t>(warp));
  });
}

// Neighbours' words through shared memory and over the grid, with barriers or without.
std::vector<int> exchange(bool with_barriers, uint32_t order) {
  std::vector<int> words(2 * 64), got(2 * 64);
  simt::run({2, 64, 64 * sizeof(int), order}, [&] {
    int* const shared = reinterpret_cast<int*>(gpu::shared_memory());
    shared[gpu::thread()] = gpu::thread();
    if (with_barriers) gpu::sync_block();
    words[static_cast<size_t>(gpu::block() * 64 + gpu::thread())] = shared[63 - gpu::thread()] + gpu::block() * 1000;
    if (with_barriers) gpu::sync_grid();
    got[static_cast<size_t>(gpu::block() * 64 + gpu::thread())] =
        words[static_cast<size_t>((1 - gpu::block()) * 64 + gpu::thread())];
  });
  return got;
}

TEST(Simt, BarriersMakeWordsVisibleAndAMissingOneShows) {
  std::vector<int> want;
  for (int i = 0; i < 128; ++i) want.push_back(63 - i % 64 + (i < 64 ? 1000 : 0));
  for (const uint32_t order : {0u, 1u, 2u}) {
    EXPECT_EQ(exchange(true, order), want);
    EXPECT_NE(exchange(false, order), want);
  }
}

// Threads clear bins of their own, then count into any: without the barrier between, a warp that is ahead counts into bins that
// another clears later. The warps meet in a vote in between, which lets no lane of theirs pass another, but other warps.
std::vector<int> count_after_clearing(bool with_barrier, uint32_t order) {
  std::vector<int> counts(128);
  simt::run({1, 128, 128 * sizeof(int), order}, [&] {
    int* const bins = reinterpret_cast<int*>(gpu::shared_memory());
    bins[gpu::thread()] = 0;
    if (with_barrier) gpu::sync_block();
    gpu::ballot(true);
    bins[127 - gpu::thread()] += 1;
    gpu::sync_block();
    counts[static_cast<size_t>(gpu::thread())] = bins[gpu::thread()];
  });
  return counts;
}

TEST(Simt, AWarpRunsAheadWhereNoBarrierHoldsIt) {
  const std::vector<int> want(128, 1);
  for (const uint32_t order : {0u, 1u, 2u, 3u}) EXPECT_EQ(count_after_clearing(true, order), want);
  EXPECT_EQ(count_after_clearing(false, 0), want);  // by number the vote alone keeps all together
  for (const uint32_t order : {1u, 2u, 3u}) EXPECT_NE(count_after_clearing(false, order), want);
}

TEST(SimtDeathTest, AMeetingThatNotAllComeToIsNamed) {
  const auto half = [] {
    if (gpu::thread() < 32) gpu::sync_block();
  };
  EXPECT_DEATH(simt::run({1, 64, 0, 0}, half), "never come at .*test_simt.cpp");
  const auto apart = [] {
    if (gpu::thread() % 2) {
      gpu::ballot(true);
    } else {
      gpu::ballot(false);
    }
  };
  EXPECT_DEATH(simt::run({1, 32, 0, 0}, apart), "meet here wait elsewhere");
}

}  // namespace
