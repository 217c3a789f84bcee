// The GPU's benchmark with tiny sizes, on emulated kernels that run on streams of the fake runtime:
// what it launches and reports, not how fast.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "bench/gpu/sections.h"
#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/units.h"
#include "tests/emulation/emulation.h"
#include "tests/emulation/fake_cublaslt.h"
#include "tests/emulation/fake_cudnn.h"
#include "tests/emulation/fake_runtime_access.h"

namespace overspill {
namespace {

constexpr uint64_t kMemory = 64 * kMiB;
const GpuBenchSizes kTiny{
    .rows = 16,
    .width = 64,
    .head_dim = 32,
    .table_rows = 20,
    .loss_rows = 3,
    .vocabulary = 300,
    .linears = {{"one", {4, 16, 8}}, {"large", {4, 4096, 4096}}},
    .attentions = {{"one", {1, 9, 2, 1, 64}, true}, {"cuDNN alone", {1, 8, 2, 2, 64}, false}},
    .blocks = {{"one", 64, 96, 2, 1, 32, 8}, {"large", 2048, 4096, 16, 8, 128, 8}},
    .step = {.hidden = 64,
             .intermediate = 96,
             .layers = 3,
             .heads = 2,
             .kv_heads = 1,
             .head_dim = 32,
             .vocabulary = 300,
             .tokens = 8,
             .micro_batches = 2,
             .steps = 2,
             .update_parameters = 8192,
             .drive_bytes = 4 * kMiB}};

const StepPlace kPlace{.gpu = 0,
                       .drives = {},
                       .rounds = {.rounds = 1, .seconds = 1e-6},
                       .drive_seconds = 0.002,
                       .seconds = 3600};

template <class F>
F* ask(const char* file, const char* name) {
  return reinterpret_cast<F*>(dlsym(dlopen(file, RTLD_NOW), name));
}

void on_stream(void* stream, void (*task)(void*), void* argument) {
  static const auto enqueue = FAKE_CUDA(fake_cuda_enqueue);
  enqueue(stream, task, argument);
}

class GpuBenchTest : public testing::Test {
 protected:
  void SetUp() override {
    set_log_level(LogLevel::off);
    setenv("OVERSPILL_CUBLASLT_LIBRARY", OVERSPILL_FAKE_CUBLASLT, 1);
    setenv("OVERSPILL_CUDNN_LIBRARY", OVERSPILL_FAKE_CUDNN, 1);
    const FakeCudaSettings settings{.seed = 3, .max_delay_us = 10};
    FAKE_CUDA(fake_cuda_configure)(&settings);
    enqueue_on_streams(true);
    device_ = make_cuda_device(kMemory, 0);
    bench_ =
        std::make_unique<GpuBench>(*device_, RoundOptions{.rounds = 1, .seconds = 1e-6}, progress_);
  }
  void free_memory() {
    bench_.reset();
    device_.reset();
  }
  void TearDown() override {
    free_memory();
    enqueue_on_streams(false);
    EXPECT_EQ(test::take_fake_cuda_misuses(), "");
    for (const std::string& error : emulation::take_errors()) ADD_FAILURE() << error;
    unsetenv("OVERSPILL_CUBLASLT_LIBRARY");
    unsetenv("OVERSPILL_CUDNN_LIBRARY");
    set_log_level(LogLevel::info);
  }
  static void enqueue_on_streams(bool enqueue) {
    emulation::set_enqueue(enqueue ? [](cudaStream_t stream, void (*task)(void*),
                                        void* argument) { on_stream(stream, task, argument); }
                                   : emulation::Enqueue{nullptr});
    ask<void(FakeCublasLtEnqueue)>(OVERSPILL_FAKE_CUBLASLT,
                                   "fake_cublaslt_set_enqueue")(enqueue ? on_stream : nullptr);
    ask<void(FakeCudnnEnqueue)>(OVERSPILL_FAKE_CUDNN,
                                "fake_cudnn_set_enqueue")(enqueue ? on_stream : nullptr);
  }

  std::set<std::string> measured_;
  const BenchProgress progress_ = [this](size_t, size_t, const std::string& text) {
    measured_.insert(text.substr(0, text.rfind(':')));
  };
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<GpuBench> bench_;
};

void expect_rate(const nlohmann::ordered_json& value) {
  EXPECT_TRUE(value.is_number() && std::isfinite(value.get<double>()) && value > 0) << value;
}

TEST_F(GpuBenchTest, EveryKernelHasItsBytesAndItsShareOfACopy) {
  const uint64_t before = emulation::launches();
  const BenchSection section = kernels_section(*bench_, kTiny);
  const auto& results = section.json.at("results");
  EXPECT_GE(emulation::launches() - before, 3 * (results.size() - 1));
  EXPECT_EQ(measured_.size(), results.size());
  EXPECT_EQ(results.at(0).at("kernel"), "copy on the GPU");
  EXPECT_EQ(results.at(0).at("bytes"), 4.0 * 16 * 64);
  EXPECT_EQ(results.at(0).at("share_of_copy"), 1);
  std::set<std::string> names;
  for (const auto& result : results) {
    names.insert(result.at("kernel"));
    expect_rate(result.at("bytes_per_second"));
    expect_rate(result.at("share_of_copy"));
    EXPECT_NE(section.text.find(result.at("kernel").get<std::string>()), std::string::npos);
  }
  for (const char* name : {"embed", "rms_norm_gradient", "rotate", "swiglu_gradient",
                           "float_to_bf16 in place", "cross_entropy", "update, adamw"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
}

TEST_F(GpuBenchTest, ProductsThatDoNotFitAreLeftOut) {
  const BenchSection section = gemm_section(*bench_, kTiny);
  const auto& results = section.json.at("results");
  ASSERT_EQ(results.size(), 1u);
  expect_rate(results.at(0).at("forward_flops_per_second"));
  expect_rate(results.at(0).at("input_gradient_flops_per_second"));
  expect_rate(results.at(0).at("weight_gradient_flops_per_second"));
  EXPECT_EQ(measured_.size(), 3u);
  EXPECT_NE(section.text.find("large: left out"), std::string::npos) << section.text;
}

TEST_F(GpuBenchTest, WithoutCublasltThereAreNoProducts) {
  setenv("OVERSPILL_CUBLASLT_LIBRARY", "/nowhere/libcublasLt.so", 1);
  const BenchSection section = gemm_section(*bench_, kTiny);
  EXPECT_NE(section.text.find("no products of matrices: "), std::string::npos) << section.text;
  EXPECT_TRUE(section.json.contains("absence"));
}

TEST_F(GpuBenchTest, BlocksAreBesideTheFastestProduct) {
  const double fastest = fastest_product(gemm_section(*bench_, kTiny));
  EXPECT_GT(fastest, 0);
  measured_.clear();
  const BenchSection section = blocks_section(*bench_, kTiny, fastest);
  const auto& results = section.json.at("results");
  ASSERT_EQ(results.size(), 1u) << section.text;
  // Four projections of attention, three of the MLP, two norms.
  EXPECT_EQ(results.at(0).at("parameters"), 64 * (64 + 32 + 32 + 64 + 3 * 96 + 2));
  expect_rate(results.at(0).at("forward_flops_per_second"));
  expect_rate(results.at(0).at("backward_flops_per_second"));
  EXPECT_EQ(measured_.size(), 2u);
  EXPECT_NE(section.text.find("large: left out, for it needs "), std::string::npos) << section.text;
}

TEST_F(GpuBenchTest, WithoutCublasltThereAreNoBlocks) {
  setenv("OVERSPILL_CUBLASLT_LIBRARY", "/nowhere/libcublasLt.so", 1);
  EXPECT_EQ(fastest_product(gemm_section(*bench_, kTiny)), 0);
  const BenchSection section = blocks_section(*bench_, kTiny, 0);
  EXPECT_NE(section.text.find("no blocks: "), std::string::npos) << section.text;
}

TEST_F(GpuBenchTest, AttentionIsMeasuredBothWays) {
  const BenchSection section = attention_section(*bench_, kTiny);
  const auto& results = section.json.at("results");
  ASSERT_EQ(results.size(), 2u);
  expect_rate(results.at(0).at("cudnn_forward_flops_per_second"));
  expect_rate(results.at(0).at("cudnn_backward_flops_per_second"));
  expect_rate(results.at(0).at("portable_forward_flops_per_second"));
  expect_rate(results.at(0).at("portable_backward_flops_per_second"));
  EXPECT_EQ(results.at(1).at("portable_forward_flops_per_second"), 0);
  EXPECT_EQ(measured_.size(), 6u);
}

TEST_F(GpuBenchTest, AttentionWithoutAPlanIsThePortableOne) {
  ask<void(int)>(OVERSPILL_FAKE_CUDNN, "fake_cudnn_refuse_plans")(2);
  const BenchSection section = attention_section(*bench_, kTiny);
  EXPECT_EQ(section.json.at("results").at(0).at("cudnn_forward_flops_per_second"), 0);
  expect_rate(section.json.at("results").at(0).at("portable_forward_flops_per_second"));
  EXPECT_NE(section.text.find("one: cuDNN has no plan: "), std::string::npos) << section.text;
  ask<void(int)>(OVERSPILL_FAKE_CUDNN, "fake_cudnn_refuse_plans")(0);
}

/// The copies as they would have been measured; the kernels and products are.
HardwareProfile tiny_profile(GpuBench& bench) {
  CopyReport copies;
  copies.devices = {{.name = "a GPU", .points = {{.bytes = kMiB}}, .nodes = {}}};
  CopyPoint& point = copies.devices[0].points[0];
  point.h2d = point.d2h = point.both_h2d = point.both_d2h = 10e9;
  copies.memory_bandwidth = 20e9;
  copies.cores = 2;
  const BenchSection kernels = kernels_section(bench, kTiny), gemm = gemm_section(bench, kTiny);
  return measured_profile(cuda_devices().gpus.at(0), copies, kernels, gemm);
}

TEST_F(GpuBenchTest, TheProfileIsWhatWasMeasured) {
  const HardwareProfile profile = tiny_profile(*bench_);
  EXPECT_TRUE(profile.device.accelerator);
  EXPECT_EQ(profile.device.memory, cuda_devices().gpus.at(0).memory_bytes);
  EXPECT_EQ(profile.link.h2d, 10e9);
  EXPECT_EQ(profile.host.memory_bandwidth, 20e9);
  EXPECT_NE(profile.device.memory_bandwidth, 0);
  EXPECT_NE(profile.device.peak_flops, DeviceProfile{}.peak_flops);
}

/// Everything that does not depend on time.
void expect_step(const nlohmann::ordered_json& json) {
  const ModelShape model = llama_layers(model_config(kTiny.step));
  EXPECT_EQ(json.at("parameters"), model.parameters());
  EXPECT_EQ(json.at("tokens"), 16);
  EXPECT_EQ(json.at("all_seconds").size(), 2u);
  for (const char* key : {"seconds", "predicted_seconds", "measured_over_predicted",
                          "light_seconds", "tokens_per_second", "share_of_fastest_product"}) {
    expect_rate(json.at(key));
  }
  for (const auto& [name, rate] : json.at("rates").items()) expect_rate(rate);
  // bf16: weights cross twice a step, but those of the embedding, of the head, and of the block
  // below it, where the backward begins, once; every gradient crosses.
  uint64_t up = 0, down = 0;
  for (uint32_t layer = 0; layer <= model.head(); ++layer) {
    const bool twice = layer > 0 && layer + 1 < model.head();
    up += (twice ? 4 : 2) * model.layers[layer].padded;
    down += 2 * model.layers[layer].padded;
  }
  EXPECT_EQ(json.at("lanes").at("h2d").at("bytes"), up);
  EXPECT_EQ(json.at("lanes").at("d2h").at("bytes"), down);
  for (const char* lane : {"compute", "h2d", "d2h", "optimizer"}) {
    expect_rate(json.at("lanes").at(lane).at("busy_seconds"));
    expect_rate(json.at("lanes").at(lane).at("predicted_busy_seconds"));
  }
}

TEST_F(GpuBenchTest, AStepIsBesideItsPrediction) {
  const HardwareProfile profile = tiny_profile(*bench_);
  free_memory();
  const BenchSection section = step_section(kTiny.step, kPlace, progress_, profile);
  ASSERT_FALSE(section.json.contains("absence")) << section.text;
  expect_step(section.json);
  EXPECT_EQ(section.json.at("optimizer_state"), "host");
  EXPECT_NE(section.text.find("predicted step time "), std::string::npos) << section.text;
}

TEST_F(GpuBenchTest, AStepsStateMayBeOnADrive) {
  const HardwareProfile profile = tiny_profile(*bench_);
  free_memory();
  std::string drive = std::filesystem::temp_directory_path() / "overspill-gpu-step-XXXXXX";
  ASSERT_NE(mkdtemp(drive.data()), nullptr);
  StepPlace place = kPlace;
  place.drives = {drive};
  const BenchSection section = step_section(kTiny.step, place, progress_, profile);
  EXPECT_TRUE(std::filesystem::is_empty(drive));
  std::filesystem::remove_all(drive);
  ASSERT_FALSE(section.json.contains("absence")) << section.text;
  expect_step(section.json);
  EXPECT_EQ(section.json.at("optimizer_state"), "nvme");
  for (const char* lane : {"nvme_read", "nvme_write"}) {
    EXPECT_GT(section.json.at("lanes").at(lane).at("bytes"), 0);
  }
  expect_rate(section.json.at("rates").at("drives_read_bytes_per_second"));
}

TEST_F(GpuBenchTest, WhereNoStepCanRunANoteSaysWhy) {
  const HardwareProfile profile = tiny_profile(*bench_);
  free_memory();
  const auto note = [&](const StepPlace& place) {
    const BenchSection section = step_section(kTiny.step, place, progress_, profile);
    EXPECT_TRUE(section.json.contains("absence"));
    return section.text;
  };
  StepPlace late = kPlace, second = kPlace;
  late.seconds = 0;
  second.gpu = 1;
  EXPECT_NE(note(late).find("were over before one could be timed"), std::string::npos);
  EXPECT_NE(note(second).find("a run alone computes on GPU 0"), std::string::npos);
  setenv("OVERSPILL_CUBLASLT_LIBRARY", "/nowhere/libcublasLt.so", 1);
  EXPECT_NE(note(kPlace).find("no step: "), std::string::npos);
}

TEST_F(GpuBenchTest, MemoryIsTakenInOrderUntilThereIsNone) {
  auto* const first = bench_->array<std::byte>(1);
  EXPECT_EQ(bench_->array<std::byte>(1) - first, 4096);
  EXPECT_TRUE(bench_->fits(kMemory - 8192));
  EXPECT_FALSE(bench_->fits(kMemory - 8191));
  EXPECT_THROW(bench_->array<std::byte>(kMemory), Error);
  bench_->reset();
  EXPECT_EQ(bench_->array<std::byte>(kMemory), first);
  std::vector<uint16_t> values(3000000);
  bench_->fill_bf16(first, values.size());
  device_->copy_to_host(reinterpret_cast<std::byte*>(values.data()), first,
                        values.size() * sizeof(uint16_t));
  EXPECT_EQ(values[1 << 20], values[0]);
  EXPECT_EQ(values.back(), values[(values.size() - 1) % (1 << 20)]);
}

TEST(GpuTestsSection, CountsWhatGoogleTestReported) {
  std::string name = std::filesystem::temp_directory_path() / "overspill-gpu-tests-XXXXXX";
  ASSERT_NE(mkdtemp(name.data()), nullptr);
  const std::filesystem::path file = std::filesystem::path(name) / "tests.json";
  std::ofstream(file) << R"({"tests": 4, "testsuites": [{"name": "A", "testsuite": [
      {"name": "x", "result": "COMPLETED"}, {"name": "y", "result": "SKIPPED"}]},
      {"name": "B/C", "testsuite": [{"name": "z/0", "result": "COMPLETED"},
      {"name": "z/1", "result": "COMPLETED", "failures": [{"failure": "no"}]}]}]})";
  const BenchSection section = tests_section({file, file}, {"checked twice"});
  EXPECT_EQ(section.json.at("passed"), 4);
  EXPECT_EQ(section.json.at("skipped"), 2);
  EXPECT_EQ(section.json.at("failed"), 2);
  EXPECT_NE(section.text.find("failed: B/C.z/1"), std::string::npos) << section.text;
  EXPECT_NE(section.text.find("note: checked twice"), std::string::npos) << section.text;
  EXPECT_EQ(section.json.at("notes").at(0), "checked twice");
  std::ofstream(file) << "[]";
  EXPECT_THROW(tests_section({file}, {}), Error);
  EXPECT_THROW(tests_section({file.string() + ".absent"}, {}), Error);
  std::filesystem::remove_all(name);
}

}  // namespace
}  // namespace overspill
