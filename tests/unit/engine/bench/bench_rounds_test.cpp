// Rounds: every task in every round, medians, works beside each other, and the end on request.
#include "engine/bench/bench_rounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "engine/base/error.h"

namespace overspill {
namespace {

const BenchProgress kQuiet = [](size_t, size_t, const std::string&) {};

TEST(Median, IsTheMiddleValue) {
  EXPECT_EQ(median({7}), 7);
  EXPECT_EQ(median({9, 1, 5}), 5);
  EXPECT_EQ(median({4, 1, 3, 2}), 3);
}

TEST(Shuffled, HoldsTheSameItemsInAnotherOrder) {
  std::vector<int> items(50);
  for (int i = 0; i < 50; ++i) items[static_cast<size_t>(i)] = i;
  std::vector<int> mixed = shuffled(items, 3);
  EXPECT_NE(mixed, items);
  EXPECT_NE(mixed, shuffled(items, 4));
  std::ranges::sort(mixed);
  EXPECT_EQ(mixed, items);
}

TEST(RatesTogether, RunsEveryWorkAtLeastOnce) {
  std::atomic<int> calls[3] = {0, 0, 0};
  std::vector<BenchWork> works;
  for (auto& count : calls) works.push_back({2.0, [&count] { ++count; }});
  const std::vector<double> rates = rates_together(works, 0);
  ASSERT_EQ(rates.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_GE(calls[i], 1);
    EXPECT_GT(rates[i], 0);
  }
}

TEST(RatesTogether, KeepsTheSlowCompanyUntilItIsMeasured) {
  std::atomic<bool> slow_done{false};
  std::atomic<int> beside{0};
  const std::vector<BenchWork> works = {{1.0,
                                         [&] {
                                           while (beside < 100) std::this_thread::yield();
                                           slow_done = true;
                                         }},
                                        {1.0, [&] { ++beside; }}};
  rates_together(works, 0);
  EXPECT_TRUE(slow_done);
}

TEST(RatesTogether, ThrowsWhatAWorkThrows) {
  for (const size_t others : {0u, 2u}) {
    std::vector<BenchWork> works(others, {1.0, [] {}});
    works.push_back({1.0, [] { fail(ErrorCode::io, "broken"); }});
    EXPECT_THROW(rates_together(works, 0), Error) << others;
  }
}

TEST(BenchRounds, VisitsEveryTaskInEveryRound) {
  int prepared = 0, called = 0;
  std::vector<BenchTask> tasks;
  for (int i = 0; i < 4; ++i) {
    tasks.push_back(
        {.name = "task", .unit = "GB/s", .works = {{1.0, [&] { ++called; }}}, .prepare = [&] {
           ++prepared;
         }});
  }
  const std::atomic<bool> stop{false};
  std::vector<size_t> seen;
  const BenchProgress progress = [&](size_t done, size_t total, const std::string& text) {
    EXPECT_EQ(total, 12u);
    EXPECT_TRUE(text.starts_with("task: ") && text.ends_with(" GB/s")) << text;
    seen.push_back(done);
  };
  BenchRounds rounds({.rounds = 3, .seconds = 0}, tasks.size(), stop, progress);
  const auto rates = rounds.measure(tasks);
  EXPECT_EQ(prepared, 12);
  EXPECT_EQ(called, 12);
  ASSERT_EQ(seen.size(), 12u);
  EXPECT_EQ(seen.back(), 12u);
  ASSERT_EQ(rates.size(), 4u);
  for (const auto& rate : rates) {
    ASSERT_EQ(rate.size(), 1u);
    EXPECT_GT(rate[0], 0);
  }
}

TEST(BenchRounds, EndsBetweenTwoTasksWhenStopped) {
  std::atomic<bool> stop{false};
  int called = 0;
  const BenchTask task{.name = "task", .unit = "", .works = {{1.0, [&] {
                                                                if (++called == 2) stop = true;
                                                              }}}};
  BenchRounds rounds({.rounds = 5, .seconds = 0}, 1, stop, kQuiet);
  try {
    rounds.measure({&task, 1});
    FAIL() << "not stopped";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::cancelled);
  }
  EXPECT_EQ(called, 2);
}

}  // namespace
}  // namespace overspill
