// A hardware profile gives a run a predicted step time before its first step.
#include <gtest/gtest.h>

#include "tests/fault/training_fixture.h"

namespace overspill::test {
namespace {

using PredictionTest = TrainingTest;

TEST_F(PredictionTest, ComesFromTheProfileBeforeTheFirstStep) {
  // Reads so slow that nothing else counts: all state is on NVMe, 16 bytes per parameter and step.
  put_file(root_ / "drives.yaml", "version: 2\ndrives: {read: 1000, mixed_read: 1000}\n");
  write_yaml("", "  hardware_profile: drives.yaml\n");
  const Child::Result result = start({}).wait();
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(has(result.err, "predicted step time "));
  EXPECT_TRUE(has(result.err, " (profile); nvme_read busy "));
  const Json last = metrics_of(root_ / "out").back();
  // By the end the rates are those of the run itself.
  EXPECT_LT(last.at("predicted_step_seconds").get<double>(), 60.0);
}

TEST_F(PredictionTest, IsNotGuessedWithoutAProfile) {
  write_yaml();
  const Child::Result result = start({"max_steps=1"}).wait();
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err.find("predicted step time"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace overspill::test
