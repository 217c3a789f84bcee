// The GPUs that `overspill info` shows, as users run it.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/emulation/fake_runtime_access.h"
#include "tests/fault/child_process.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

class InfoCommand : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(directory_); }
  void TearDown() override { fs::remove_all(directory_); }
  std::string run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), "info");
    const auto result = test::Child(directory_, arguments, {}).wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out;
  }
  const fs::path directory_ =
      fs::temp_directory_path() / ("overspill-info-" + std::to_string(::getpid()));
};

TEST_F(InfoCommand, ShowsGpusAndWhichReachEachOther) {
  if (!test::fake_cuda_is_built()) GTEST_SKIP() << "built without CUDA's headers";
  setenv("OVERSPILL_CUDART", OVERSPILL_FAKE_CUDART, 1);
  setenv("OVERSPILL_FAKE_CUDA_DEVICES", "3", 1);
  const std::string text = run({});
  EXPECT_NE(text.find("cuda gpus         0  0000:1a:00.0 any NUMA node  Fake GPU 0, 1.00 GiB, "
                      "compute capability 9.0, reaches memory of GPU 1, 2\n"),
            std::string::npos)
      << text;
  const auto json = nlohmann::json::parse(run({"--json"}));
  EXPECT_EQ(json["cuda"]["absence"], nullptr);
  EXPECT_EQ(json["cuda"]["gpus"][2]["pci"], "0000:1c:00.0");
  EXPECT_EQ(json["cuda"]["gpus"][2]["peers"], nlohmann::json({0, 1}));
}

TEST_F(InfoCommand, SaysWhyThereIsNoGpu) {
  setenv("OVERSPILL_CUDART", "/nowhere/libcudart.so", 1);
  EXPECT_NE(run({}).find("cuda gpus         none: "), std::string::npos);
  const auto json = nlohmann::json::parse(run({"--json"}));
  EXPECT_NE(json["cuda"]["absence"], nullptr);
  EXPECT_EQ(json["cuda"]["gpus"].size(), 0u);
}

}  // namespace
}  // namespace overspill
