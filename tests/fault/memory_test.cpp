// Peak resident memory of the real command stays within its budgets, whatever the model's state;
// budgets that nobody gives stay within the container's limit.
#include <gtest/gtest.h>

#include "tests/fault/training_fixture.h"

namespace overspill {
namespace {

using namespace test;

class MemoryBudget : public TrainingTest {
 protected:
  static constexpr uint64_t kAllowance = 150 * kMiB;  // text, libraries, BLAS scratch

  /// 5.7 M parameters: 80 MB of state in bf16, 68 MB in float32.
  void SetUp() override {
    TrainingTest::SetUp();
    Json shape = shape_json(false);
    shape["hidden_size"] = 256;
    shape["intermediate_size"] = 688;
    shape["num_hidden_layers"] = 6;
    shape["vocab_size"] = 2000;
    fs::create_directory(root_ / "large");
    put_file(root_ / "large" / "config.json", shape.dump());
    write_yaml();
  }
  Json final_of(const std::vector<std::string>& sets) const {
    fs::remove_all(root_ / "out");
    const Child::Result result = start(sets).wait(120);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return metrics_of(root_ / "out").back();
  }
};

TEST_F(MemoryBudget, PeakResidentMemoryStaysWithinBudgets) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep memory of their own";
#endif
  // What the process takes whatever it trains: a model of 2.4 MB of state.
  const auto floor = final_of({}).at("peak_rss").get<uint64_t>();
  EXPECT_LT(floor, kAllowance);
  for (const char* device : {"unified", "discrete"}) {
    for (const char* precision : {"bf16", "float32"}) {
      if (std::string(device) == "unified" && std::string(precision) == "float32") continue;
      SCOPED_TRACE(std::string(precision) + " " + device);
      const Json last =
          final_of({"base_model_config=" + (root_ / "large").string(), "max_steps=2",
                    std::string("precision=") + precision, std::string("offload.device=") + device,
                    "offload.chunk_parameters=65536", "offload.device_memory=16MiB",
                    "offload.host_memory=8MiB"});
      const auto peak = last.at("peak_rss").get<uint64_t>();
      const uint64_t device_memory = 16 * kMiB, host_memory = 8 * kMiB;
      EXPECT_GT(last.at("nvme_bytes").get<uint64_t>(), 60'000'000u);
      EXPECT_LE(last.at("device_memory_peak").get<uint64_t>(), device_memory);
      EXPECT_LE(last.at("host_memory_peak").get<uint64_t>(), host_memory);
      EXPECT_LE(peak, device_memory + host_memory + kAllowance);
      RecordProperty("above_floor_bytes", std::to_string(peak - floor));
      // Tighter than the promise: the state would not fit into this, the allowance has room for it.
      EXPECT_LE(peak, floor + device_memory + host_memory + 16 * kMiB);
    }
  }
}

TEST_F(MemoryBudget, ThatTheConfigurationLeavesOpenIsAThirdOfAContainersLimit) {
  const std::string limits = root_ / "limits";
  fs::create_directory(limits);
  put_file(root_ / "limits" / "memory.max", std::to_string(768 * kMiB) + "\n");
  const std::string mount = "mount --bind " + limits + " /sys/fs/cgroup";
  if (!shell("unshare -m " + mount)) GTEST_SKIP() << "no permission to mount";
  std::string yaml = bytes_of_file(root_ / "train.yaml");
  for (const std::string line : {"  device_memory: 64MiB\n", "  host_memory: 64MiB\n"}) {
    yaml.erase(yaml.find(line), line.size());
  }
  put_file(root_ / "train.yaml", yaml);
  Child train(root_,
              {"-m", "sh", "-c", mount + " && exec \"$@\"", "sh", OVERSPILL_BINARY, "train",
               root_ / "train.yaml", "--set", "offload.device=discrete"},
              {.cpus = {}, .program = "unshare"});
  const Child::Result result = train.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(has(result.err, " of 256.00 MiB, host ")) << result.err;
  EXPECT_TRUE(has(result.err, " of 256.00 MiB, nvme ")) << result.err;
}

}  // namespace
}  // namespace overspill
