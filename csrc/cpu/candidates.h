// The candidates of all blocks, and the search for the cut among them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/cut.h"
#include "driver.h"
#include "kernels.h"

namespace m2po {

// Memory for the candidates that one thread finds: chunks, so that nothing is copied as the list grows.
template <class Real>
class Arena {
 public:
  // Room for one block's worst case; what it does not use is handed out again.
  Candidates<Real> reserve() {
    if (used_ + kWorst > size_) {
      // The first chunk is small: at a healthy share of candidates it is the only one, and a fresh huge page takes as long to
      // clear as 200,000 tokens to sweep.
      const size_t size = chunks_.empty() ? 4 * kWorst : kHugePage;
      void* chunk = chunks_.empty() ? std::malloc(size) : std::aligned_alloc(kHugePage, size);
      if (!chunk) throw std::bad_alloc();
      chunks_.emplace_back(static_cast<char*>(chunk));
      advise_huge(chunk, static_cast<int64_t>(size));
      size_ = size;
      used_ = 0;
    }
    Candidates<Real> list;
    list.v = reinterpret_cast<Real*>(chunks_.back().get() + used_);
    list.policy = list.v + kSlots;
    list.offset = reinterpret_cast<uint16_t*>(list.policy + kSlots);
    return list;
  }

  // Moves the arrays of a reserved list together, so that the next one starts right behind.
  void commit(Candidates<Real>& list) {
    const size_t room = (static_cast<size_t>(list.count) + 3) / 4 * 4;
    Real* policy = list.v + room;
    uint16_t* offset = reinterpret_cast<uint16_t*>(policy + room);
    std::memmove(policy, list.policy, static_cast<size_t>(list.count) * sizeof(Real));
    std::memmove(offset, list.offset, static_cast<size_t>(list.count) * sizeof(uint16_t));
    list.policy = policy;
    list.offset = offset;
    used_ += room * (2 * sizeof(Real) + sizeof(uint16_t));
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  static constexpr size_t kSlots = kBlock + kCandidateRoom;
  static constexpr size_t kWorst = kSlots * (2 * sizeof(Real) + sizeof(uint16_t));
  static constexpr size_t kHugePage = size_t{1} << 21;
  std::vector<std::unique_ptr<char, Free>> chunks_;
  size_t size_ = 0, used_ = 0;
};

// Candidates below which a pass over them stays on one thread: about 30 microseconds of work.
inline constexpr int64_t kSerialCandidates = 1 << 16;

template <class Real>
class CutSearch {
 public:
  using Int = typename Bits<Real>::Int;

  CutSearch(const std::vector<Candidates<Real>>& lists, const Slack<Real>& slack, const Parallel& parallel)
      : lists_(lists), slack_(slack), parallel_(parallel) {
    for (const auto& list : lists) total_ += list.count;
    const int64_t blocks = static_cast<int64_t>(lists.size());
    grain_ = total_ < kSerialCandidates ? std::max<int64_t>(blocks, 1) : std::max<int64_t>(1, blocks * kSerialCandidates / total_);
  }

  int64_t total() const { return total_; }

  Cut<Real> find() {
    if (total_ == 0) return {};
    if constexpr (std::is_same_v<Real, float>) {
      return by_digits();
    } else {
      return by_sorting();
    }
  }

 private:
  // Bins of the digit (bits >> shift) & mask over the candidates whose higher bits are `prefix`.
  std::vector<Bin> histogram(int shift, int width, Int prefix) {
    const Int mask = (Int{1} << width) - 1;
    const bool all = shift + width >= static_cast<int>(sizeof(Int) * 8) - 1;
    std::vector<Bin> bins(size_t{1} << width);
    std::mutex mutex;
    using Sum = std::conditional_t<std::is_same_v<Real, float>, int64_t, Wide>;  // 2^31 mantissas of 24 bits fit 64
    parallel_(static_cast<int64_t>(lists_.size()), grain_, [&](int64_t begin, int64_t end) {
      std::vector<std::pair<int64_t, Sum>> mine(bins.size());
      for (int64_t b = begin; b < end; ++b) {
        const auto& list = lists_[static_cast<size_t>(b)];
        for (int i = 0; i < list.count; ++i) {
          const Int bits = to_bits(list.v[i]);
          if (!all && (bits >> (shift + width)) != prefix) continue;
          auto& bin = mine[(bits >> shift) & mask];
          ++bin.first;
          bin.second += mantissa_of<Real>(bits);
        }
      }
      const std::lock_guard<std::mutex> lock(mutex);
      for (size_t i = 0; i < bins.size(); ++i) {
        bins[i].count += mine[i].first;
        bins[i].mantissas += mine[i].second;
      }
    });
    return bins;
  }

  // Pays bin by bin, ascending; the first that cannot be paid for, or -1.
  int64_t first_unpaid(const std::vector<Bin>& bins, int shift, int width, Int prefix) {
    for (size_t i = 0; i < bins.size(); ++i) {
      const Int bits = ((prefix << width) | static_cast<Int>(i)) << shift;
      if (!slack_.pay(bins[i], exponent_field<Real>(bits))) return static_cast<int64_t>(i);
    }
    return -1;
  }

  // fp32: 11 + 10 + 10 bits of v. The first digit holds the exponent, so every bin's sum is one exact integer.
  Cut<Real> by_digits() {
    Int prefix = 0;
    for (const auto& [shift, width] : {std::pair{20, 11}, std::pair{10, 10}, std::pair{0, 10}}) {
      const auto bins = histogram(shift, width, prefix);
      const int64_t digit = first_unpaid(bins, shift, width, prefix);
      if (digit < 0) return {};
      prefix = (prefix << width) | static_cast<Int>(digit);
      if (shift == 0) return at(prefix, bins[static_cast<size_t>(digit)].count);
    }
    return {};
  }

  // The cut at the value with these bits, `count` candidates of which exist: the earliest ones go.
  Cut<Real> at(Int bits, int64_t count) {
    int64_t dropped = count - slack_.affordable(bits, count);
    const Real value = from_bits<Real>(bits);
    std::vector<int32_t> equals(lists_.size());
    parallel_(static_cast<int64_t>(lists_.size()), grain_, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const auto& list = lists_[static_cast<size_t>(b)];
        int32_t n = 0;
        for (int i = 0; i < list.count; ++i) n += list.v[i] == value;
        equals[static_cast<size_t>(b)] = n;
      }
    });
    size_t block = 0;
    while (dropped > equals[block]) dropped -= equals[block++];
    const auto& list = lists_[block];
    int place = -1;
    while (dropped > 0) dropped -= list.v[++place] == value;
    return {value, static_cast<int64_t>(block) * kBlock + list.offset[place]};
  }

  // fp64: sums per exponent, then a sort of the one exponent in which the slack runs out.
  Cut<Real> by_sorting() {
    const auto bins = histogram(52, 11, 0);
    const int64_t field = first_unpaid(bins, 52, 11, 0);
    if (field < 0) return {};
    std::vector<Real> members;
    for (const auto& list : lists_)
      for (int i = 0; i < list.count; ++i)
        if (exponent_field<Real>(to_bits(list.v[i])) == field) members.push_back(list.v[i]);
    std::sort(members.begin(), members.end());
    for (size_t i = 0; i < members.size();) {
      size_t next = i;
      Bin bin;
      const Int bits = to_bits(members[i]);
      for (; next < members.size() && members[next] == members[i]; ++next) {
        ++bin.count;
        bin.mantissas += mantissa_of<Real>(bits);
      }
      if (!slack_.pay(bin, static_cast<int>(field))) return at(bits, bin.count);
      i = next;
    }
    return {};
  }

  const std::vector<Candidates<Real>>& lists_;
  Slack<Real> slack_;
  const Parallel& parallel_;
  int64_t total_ = 0, grain_ = 1;
};

}  // namespace m2po
