// The real cuDNN, where it is installed, asked for plans for GPUs that are described to it: every
// attention shape of the families that the engine trains has one, within the default workspace.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "engine/base/error.h"
#include "engine/model/cuda_dnn_attention.h"

namespace overspill::cuda {
namespace {

struct Gpu {
  const char* name;
  int architecture;  ///< cuDNN's way: 900 is sm_90
  int processors, threads, blocks;
  int64_t shared_memory, memory, l2_cache;
};

void PrintTo(const Gpu& gpu, std::ostream* out) { *out << gpu.name; }

const Gpu kGpus[] = {
    {"A100", 800, 108, 2048, 32, 166912, 85'100'000'000, 41'943'040},
    {"L40S", 890, 142, 1536, 24, 101376, 47'800'000'000, 100'663'296},
    {"H200", 900, 132, 2048, 32, 232448, 150'100'000'000, 62'914'560},
    {"RTX_PRO_6000", 1200, 188, 1536, 24, 101376, 102'000'000'000, 134'217'728},
};

std::string described(const Gpu& gpu) {
  return fmt::format(
      R"({{"deviceVer":{},"multiProcessorCount":{},"maxThreadsPerSM":{},"maxCtasPerSM":{},)"
      R"("maxSharedMemoryPerBlockOptin":{},"totalGlobalMem":{},"l2CacheSize":{},)"
      R"("deviceName":"{}","warpSize":32,"maxSharedMemoryPerBlock":49152,)"
      R"("reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"regsPerBlock":65536,)"
      R"("maxThreadsPerBlock":1024,"smClockRateKHz":1980000,"memClockRateKHz":3201000,)"
      R"("maxBlockSize":[1024,1024,64],"maxGridSize":[2147483647,65535,65535],)"
      R"("supportCoopLaunch":1,"pciDeviceId":0,"isTccDriver":0,"cudaDeviceId":0,)"
      R"("driverVer":13000}})",
      gpu.architecture, gpu.processors, gpu.threads, gpu.blocks, gpu.shared_memory, gpu.memory,
      gpu.l2_cache, gpu.name);
}

struct Model {
  const char* names;
  uint32_t heads, kv_heads, head_dim;
};

const Model kModels[] = {
    {"Llama-3.1-8B, Qwen3-4B/8B, Mistral-7B, -Nemo, -Small", 32, 8, 128},
    {"Llama-3.1-70B, Qwen2.5-72B, Qwen3-32B", 64, 8, 128},
    {"Llama-3.1-405B", 128, 8, 128},
    {"Llama-3.2-1B", 32, 8, 64},
    {"Llama-3.2-3B", 24, 8, 128},
    {"Qwen2.5-0.5B", 14, 2, 64},
    {"Qwen2.5-1.5B", 12, 2, 128},
    {"Qwen2.5-3B", 16, 2, 128},
    {"Qwen2.5-7B", 28, 4, 128},
    {"Qwen2.5-14B/32B, Qwen3-14B", 40, 8, 128},
    {"Qwen3-0.6B/1.7B", 16, 8, 128},
    {"Qwen3-30B-A3B", 32, 4, 128},
    {"Qwen3-235B-A22B", 64, 4, 128},
    {"Mistral-Large", 96, 8, 128},
    {"heads of 80", 32, 32, 80},
    {"heads of 96", 32, 32, 96},
};

double mib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

class AttentionPlans : public testing::TestWithParam<Gpu> {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "sanitizers cannot see into cuDNN, which keeps memory of libraries it unloads";
#endif
    unsetenv("OVERSPILL_CUDNN_LIBRARY");
    // Before cuDNN opens libcuda.so.1: a library that is loaded under that name is taken.
    ASSERT_NE(dlopen(OVERSPILL_FAKE_DRIVER, RTLD_NOW | RTLD_GLOBAL), nullptr) << dlerror();
    std::string refusal;
    try {
      library_ = open_dnn_library(refusal);
    } catch (const Error& error) {
      refusal = error.what();
    }
    if (!library_) GTEST_SKIP() << refusal;
  }

  std::optional<DnnAttention> plan(const AttentionShape& shape, const DnnAttentionOptions& options,
                                   std::string& refusal) {
    return DnnAttention::make(DnnTarget(*library_, described(GetParam())), shape, options, refusal);
  }

  std::optional<DnnLibrary> library_;
};

TEST_P(AttentionPlans, ExistForEveryModel) {
  std::printf("%s, 2 x 4096 tokens: workspace in MiB\n", GetParam().name);
  std::printf("%5s %4s %4s %9s %9s %6s  %s\n", "heads", "kv", "size", "forward", "backward",
              "parts", "models");
  for (const Model& model : kModels) {
    std::string refusal;
    const DnnAttentionOptions options;
    const auto attention =
        plan({2, 4096, model.heads, model.kv_heads, model.head_dim}, options, refusal);
    ASSERT_TRUE(attention) << model.names << ": " << refusal;
    EXPECT_LE(attention->backward_workspace_bytes(), options.most_workspace_bytes) << model.names;
    std::printf("%5u %4u %4u %9.1f %9.1f %6llu  %s\n", model.heads, model.kv_heads, model.head_dim,
                mib(attention->forward_workspace_bytes()),
                mib(attention->backward_workspace_bytes()),
                static_cast<unsigned long long>(attention->backward_parts()), model.names);
  }
}

TEST_P(AttentionPlans, ExistForEveryLengthAndWindow) {
  for (const uint64_t tokens : {1, 77, 1000, 2048, 8192}) {
    std::string refusal;
    const auto attention = plan({1, tokens, 32, 8, 128}, {}, refusal);
    EXPECT_TRUE(attention) << tokens << " tokens: " << refusal;
  }
  std::string refusal;
  const AttentionShape mistral{1, 8192, 32, 8, 128};
  EXPECT_TRUE(plan(mistral, {.window = 4096}, refusal)) << refusal;
  EXPECT_TRUE(plan({1, 32768, 32, 8, 128}, {.deterministic = false}, refusal)) << refusal;
}

TEST_P(AttentionPlans, ExistForDocuments) {
  for (const Model& model : kModels) {
    std::string refusal;
    const AttentionShape shape{2, 4096, model.heads, model.kv_heads, model.head_dim};
    EXPECT_TRUE(plan(shape, {.documents = true}, refusal)) << model.names << ": " << refusal;
  }
  for (const uint64_t tokens : {1, 77, 1000, 2048, 8192}) {
    std::string refusal;
    EXPECT_TRUE(plan({1, tokens, 32, 8, 128}, {.documents = true}, refusal))
        << tokens << " tokens: " << refusal;
  }
}

TEST_P(AttentionPlans, SayWhyThereIsNone) {
  std::string refusal;
  // Scores of one group of heads alone are 8 GiB.
  EXPECT_FALSE(plan({1, 32768, 32, 8, 128}, {}, refusal));
  EXPECT_EQ(refusal, "backward needs more than the 1073741824 bytes of workspace that it may use");
  refusal.clear();
  const bool wide = plan({1, 1024, 8, 8, 256}, {}, refusal).has_value();
  EXPECT_EQ(wide, GetParam().architecture == 900) << refusal;
  if (!wide) {
    EXPECT_FALSE(refusal.empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Gpus, AttentionPlans, testing::ValuesIn(kGpus),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace overspill::cuda
