// What a parallel loop's body throws reaches the caller, once every other turn is done.
#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <vector>

#include "cpu/parallel.h"

namespace {

TEST(ParallelFor, ExceptionsReachTheCaller) {
  for (const int threads : {1, 2, 5}) {
    std::atomic<int> done{0};
    const auto body = [&](int64_t i) {
      if (i % 7 == 3) throw std::bad_alloc();
      ++done;
    };
    EXPECT_THROW(fold::cpu::parallel_for(100, threads, body), std::bad_alloc) << threads << " threads";
    EXPECT_EQ(done, 100 - 14) << threads << " threads";
  }
}

TEST(ParallelFor, EveryIndexOnce) {
  for (const int64_t count : {0, 1, 63, 1000}) {
    std::vector<std::atomic<int>> turns(static_cast<size_t>(count));
    fold::cpu::parallel_for(count, [&](int64_t i) { ++turns[static_cast<size_t>(i)]; });
    for (const auto& n : turns) EXPECT_EQ(n, 1);
  }
}

}  // namespace
