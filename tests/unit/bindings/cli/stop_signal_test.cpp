// What the first, the next and a later signal do to the command in the midst of a long step.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>

#include "tests/fault/training_fixture.h"

namespace overspill::test {
namespace {

using std::chrono::milliseconds;

class StopSignal : public TrainingTest {
 protected:
  /// A run with a step of some milliseconds a micro-batch.
  std::unique_ptr<Child> start_long_step(int micro_batches) const {
    write_yaml();
    auto child = std::make_unique<Child>(
        root_,
        std::vector<std::string>{"train", root_ / "train.yaml", "--set",
                                 "gradient_accumulation_steps=" + std::to_string(micro_batches),
                                 "--set", "max_steps=2"},
        Child::Options{});
    EXPECT_TRUE(child->wait_until([&] { return fs::exists(root_ / "out" / "metrics.jsonl"); }));
    return child;
  }
};

TEST_F(StopSignal, OneThatComesAgainAtOnceIsTheSameRequest) {
  const auto child = start_long_step(500);
  for (const int signal : {SIGTERM, SIGINT, SIGTERM}) {
    child->send(signal);
    std::this_thread::sleep_for(milliseconds(50));
  }
  const Child::Result result = child->wait();
  EXPECT_EQ(result.exit_code, 130) << result.signal << result.err;
  EXPECT_TRUE(fs::exists(root_ / "out" / "latest"));
}

TEST_F(StopSignal, AnotherOneEndsTheCommand) {
  const auto child = start_long_step(20000);
  child->send(SIGTERM);
  std::this_thread::sleep_for(milliseconds(2100));
  child->send(SIGINT);
  EXPECT_EQ(child->wait().signal, SIGINT);
  EXPECT_FALSE(fs::exists(root_ / "out" / "latest"));
}

}  // namespace
}  // namespace overspill::test
