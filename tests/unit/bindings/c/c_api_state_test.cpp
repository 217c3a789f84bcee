// Weights in and out, and checkpoints: what comes back is what went in, and a run goes on bit for
// bit.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "tests/unit/bindings/c/small_engine.h"

namespace overspill {
namespace {

using namespace test;
namespace fs = std::filesystem;

class CApiState : public SmallEngineTest {
 protected:
  std::string bf16(const std::string& offload = "") const {
    std::string text = configuration("", offload);
    return "precision: bf16\n" + text.substr(text.find('\n') + 1);
  }
};

TEST_F(CApiState, TensorsKeepEveryBitOfTheirMasters) {
  for (const std::string& text : {configuration(), bf16()}) {
    osp_engine_t engine = make(text);
    const std::vector<float> values = gradient(3, 64 * 192);
    OSP_OK(osp_tensor_write(engine, "block.weight", values.data(), OSP_FLOAT32, values.size()));
    EXPECT_EQ(read(engine, "block.weight", values.size()), values);
    std::vector<uint16_t> bits(64 * 192);
    OSP_OK(osp_tensor_read(engine, "block.weight", bits.data(), OSP_BFLOAT16, bits.size()));
    EXPECT_NEAR(std::bit_cast<float>(uint32_t{bits[5]} << 16), values[5], 0.01);
    // A tied tensor is the other one.
    EXPECT_EQ(read(engine, "head.weight", 6400), read(engine, "embed.weight", 6400));
    OSP_OK(osp_engine_destroy(engine));
  }
}

TEST_F(CApiState, ExportedWeightsLoadAgain) {
  osp_engine_t engine = make(configuration());
  step(engine, 1);
  const fs::path model = root_ / "model";
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_export_weights(engine, model.c_str(), "[1]"));
  OSP_OK(osp_export_weights(engine, model.c_str(), R"({"model_type": "small"})"));
  EXPECT_TRUE(fs::exists(model / "config.json"));
  const std::vector<float> all = read_all(engine);
  osp_engine_t other = make(configuration());
  EXPECT_NE(read_all(other), all);
  OSP_OK(osp_load_weights(other, model.c_str()));
  EXPECT_EQ(read_all(other), all);
  OSP_OK(osp_load_weights(other, (model / "model.safetensors").c_str()));
  EXPECT_EQ(read_all(other), all);
  OSP_OK(osp_engine_destroy(engine));
  OSP_OK(osp_engine_destroy(other));
}

TEST_F(CApiState, RunsGoOnBitForBitWhereTheyWereSaved) {
  const std::string host = "  optimizer: host\n";
  for (const bool in_backward : {false, true}) {
    std::string text = bf16(in_backward ? "  update: in_backward\n" : "");
    if (in_backward) text = "max_grad_norm: 0\n" + text;
    osp_engine_t whole = make(text);
    const fs::path out = root_ / (in_backward ? "in_backward" : "next_forward");
    osp_checkpoint_options_t options = OSP_CHECKPOINT_OPTIONS_INIT;
    options.user_state = "{\"epoch\": 3}";
    for (uint64_t key = 1; key < 7; ++key) {
      step(whole, key, in_backward);
      if (key == 3) {
        OSP_EXPECT(OSP_SUCCESS, osp_checkpoint_save(whole, out.c_str(), &options));
      }
    }
    int32_t done = 0;
    OSP_OK(osp_checkpoint_wait(whole));
    OSP_OK(osp_checkpoint_poll(whole, &done));
    EXPECT_EQ(done, 1);
    std::string elsewhere = text;
    elsewhere.replace(elsewhere.find("optimizer: nvme"), 15, "optimizer: host");
    osp_engine_t resumed = make(elsewhere);
    OSP_OK(osp_checkpoint_load(resumed, out.c_str()));
    char state[64] = {};
    OSP_OK(osp_checkpoint_user_state(resumed, state, sizeof state, nullptr));
    EXPECT_STREQ(state, "{\"epoch\": 3}");
    for (uint64_t key = 4; key < 7; ++key) step(resumed, key, in_backward);
    osp_step_result_t result = OSP_STEP_RESULT_INIT;
    OSP_OK(osp_step_wait(resumed, &result));
    EXPECT_EQ(result.step, 6u);
    EXPECT_EQ(read_all(whole), read_all(resumed));
    OSP_OK(osp_engine_destroy(whole));
    OSP_OK(osp_engine_destroy(resumed));
  }
}

TEST_F(CApiState, DamagedAndForeignCheckpointsAreRefused) {
  osp_engine_t engine = make(configuration());
  step(engine, 1);
  const fs::path out = root_ / "out";
  OSP_OK(osp_checkpoint_save(engine, out.c_str(), nullptr));
  OSP_OK(osp_checkpoint_wait(engine));
  osp_engine_t other = make(bf16());
  const std::vector<float> before = read_all(other);
  OSP_EXPECT(OSP_ERROR_INVALID_CONFIG, osp_checkpoint_load(other, out.c_str()));
  EXPECT_EQ(read_all(other), before);
  fs::resize_file(out / "checkpoint-1" / "optimizer.safetensors", 100);
  OSP_EXPECT(OSP_ERROR_INVALID_FILE, osp_checkpoint_load(engine, out.c_str()));
  step(engine, 2);
  OSP_OK(osp_engine_destroy(engine));
  OSP_OK(osp_engine_destroy(other));
}

TEST_F(CApiState, SavingThatFailsLeavesTheEngineAsItWas) {
  osp_engine_t engine = make(configuration());
  step(engine, 1);
  OSP_OK(osp_checkpoint_save(engine, "/proc/overspill", nullptr));
  OSP_EXPECT(OSP_ERROR_IO, osp_checkpoint_wait(engine));
  step(engine, 2);
  OSP_OK(osp_checkpoint_save(engine, (root_ / "out").c_str(), nullptr));
  OSP_OK(osp_checkpoint_wait(engine));
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiState, ProgressMayEndWhatItIsToldOf) {
  std::atomic<bool> stop = false;
  osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
  options.user = &stop;
  options.progress = [](void* user, const char* what, double fraction) {
    EXPECT_NE(what, nullptr);
    EXPECT_GT(fraction, 0.0);
    EXPECT_LE(fraction, 1.0);
    return static_cast<std::atomic<bool>*>(user)->load() ? 1 : 0;
  };
  osp_engine_t engine = make(configuration(), options);
  step(engine, 1);
  stop = true;
  const fs::path out = root_ / "out";
  OSP_OK(osp_checkpoint_save(engine, out.c_str(), nullptr));
  OSP_EXPECT(OSP_ERROR_CANCELLED, osp_checkpoint_wait(engine));
  EXPECT_FALSE(fs::exists(out / "checkpoint-1"));
  OSP_EXPECT(OSP_ERROR_CANCELLED, osp_initialize_weights(engine, 1, 0.1));
  stop = false;
  OSP_OK(osp_initialize_weights(engine, 1, 0.1));
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiState, LoadingDropsAStepThatHasBegun) {
  for (const bool in_backward : {false, true}) {
    const std::string text = configuration("gradient_accumulation_steps: 2\nmax_grad_norm: 0\n",
                                           in_backward ? "  update: in_backward\n" : "");
    const std::string out = (root_ / (in_backward ? "in_backward" : "next_forward")).string();
    std::vector<std::vector<float>> results;
    for (const bool begun : {false, true}) {
      const osp_engine_t engine = make(text);
      if (!begun) {
        OSP_OK(osp_checkpoint_save(engine, out.c_str(), nullptr));
        OSP_OK(osp_checkpoint_wait(engine));
      }
      osp_step_options_t rates = OSP_STEP_OPTIONS_INIT;
      rates.learning_rate = 1e-2;
      if (begun) {
        if (in_backward) {
          OSP_OK(osp_step_begin(engine, &rates));
        }
        use(engine, 0);
        for (const uint64_t key : {8, 9}) submit(engine, 1, key);  // all of this layer's
        submit(engine, 0, 7);                                      // and a part of another's
      }
      OSP_OK(osp_checkpoint_load(engine, out.c_str()));
      if (in_backward) {
        OSP_OK(osp_step_begin(engine, &rates));
      }
      for (const uint64_t key : {1, 2}) {
        for (uint32_t layer = 3; layer-- > 0;) submit(engine, layer, key);
      }
      OSP_OK(osp_step(engine, in_backward ? nullptr : &rates));
      results.push_back(read_all(engine));
      osp_statistics_t statistics = OSP_STATISTICS_INIT;
      OSP_OK(osp_get_statistics(engine, &statistics));
      EXPECT_EQ(statistics.steps, 1u);
      OSP_OK(osp_engine_destroy(engine));
    }
    EXPECT_TRUE(results[0] == results[1]) << in_backward;
  }
}

TEST_F(CApiState, WhatPathsDoNotAllowIsNamed) {
  osp_engine_t engine = make(configuration());
  std::ofstream(root_ / "file") << "x";
  OSP_EXPECT(OSP_ERROR_IO, osp_export_weights(engine, (root_ / "file/out").c_str(), nullptr));
  fs::create_directory(root_ / "dangling");
  fs::create_symlink("checkpoint-7", root_ / "dangling/latest");
  OSP_EXPECT(OSP_ERROR_NOT_FOUND, osp_checkpoint_load(engine, (root_ / "dangling").c_str()));
  osp_checkpoint_options_t options = OSP_CHECKPOINT_OPTIONS_INIT;
  options.user_state = "\xff\xfe";
  const std::string out = (root_ / "out").string();
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_checkpoint_save(engine, out.c_str(), &options));
  EXPECT_FALSE(fs::exists(out));
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiState, TensorsCanBeWrittenFirst) {
  const osp_engine_t drawn = make(configuration());
  osp_engine_t written = nullptr;
  OSP_OK(osp_engine_create(configuration().c_str(), nullptr, &written));
  register_all(written);
  OSP_OK(osp_finalize(written, nullptr));
  float value = 0;
  const std::string out = (root_ / "unset").string();
  OSP_EXPECT(OSP_ERROR_NO_WEIGHTS, osp_acquire(written, 0, nullptr, nullptr, 0));
  OSP_EXPECT(OSP_ERROR_NO_WEIGHTS, osp_prefetch(written, 0));
  OSP_EXPECT(OSP_ERROR_NO_WEIGHTS, osp_export_weights(written, out.c_str(), nullptr));
  OSP_EXPECT(OSP_ERROR_NO_WEIGHTS, osp_checkpoint_save(written, out.c_str(), nullptr));
  std::vector<float> bias(64);
  OSP_EXPECT(OSP_ERROR_NO_WEIGHTS,
             osp_tensor_read(written, "block.bias", bias.data(), OSP_FLOAT32, bias.size()));
  OSP_EXPECT(OSP_ERROR_UNKNOWN_TENSOR, osp_tensor_write(written, "x", &value, OSP_FLOAT32, 1));
  OSP_EXPECT(OSP_ERROR_NO_WEIGHTS, osp_acquire(written, 0, nullptr, nullptr, 0));
  for (const auto& layer : small_layers()) {
    for (const SmallTensor& tensor : layer) {
      if (tensor.tied_to != nullptr) continue;
      const std::vector<float> values = read(drawn, tensor.name, tensor.count());
      OSP_OK(osp_tensor_write(written, tensor.name, values.data(), OSP_FLOAT32, values.size()));
    }
  }
  for (const osp_engine_t engine : {drawn, written}) {
    for (uint64_t key = 1; key < 3; ++key) step(engine, key);
  }
  EXPECT_EQ(read_all(drawn), read_all(written));
  OSP_OK(osp_engine_destroy(drawn));
  OSP_OK(osp_engine_destroy(written));
}

}  // namespace
}  // namespace overspill
