// The C API with GPUs: another program's streams and memory, on the emulated one. What is not
// ordered by events comes in another order there.
#include <algorithm>
#include <optional>

#include "tests/emulation/c_api_gpu.h"

namespace overspill {
namespace {

using namespace test;

TEST_F(CApiGpu, GivesTheHostsBits) {
  configure_fake(200);
  struct Case {
    const char *more, *offload;
    bool in_backward;
    osp_loop_t loop = OSP_LOOP_MICRO_BATCH_MAJOR;
  };
  const Case cases[] = {
      {"gradient_accumulation_steps: 2\n", "", false},
      {"gradient_accumulation_steps: 2\n", "  gradients: nvme\n  prefetch_depth: 0\n", false},
      {"gradient_accumulation_steps: 2\nmax_grad_norm: 0\n", "  update: in_backward\n", true},
      {"max_grad_norm: 0.5\noptimizer: adafactor\n", "", false, OSP_LOOP_MICRO_BATCH_MAJOR},
      {"optimizer: lion\noptimizer_state: int8\n", "", false, OSP_LOOP_MICRO_BATCH_MAJOR}};
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.more) + c.offload);
    const uint32_t micro_batches = std::string(c.more).starts_with("gradient") ? 2 : 1;
    std::vector<std::vector<float>> results;
    for (const char* device : {"host", "cuda:1"}) {
      const bool on_host = std::string(device) == "host";
      std::optional<ProgramGpu> gpu;
      if (!on_host) gpu.emplace(1);
      osp_engine_options_t options = on(device);
      options.loop = c.loop;
      const osp_engine_t engine = make(configuration(c.more, c.offload), options);
      ASSERT_NE(engine, nullptr);
      train(engine, gpu ? &*gpu : nullptr, 1, 3, micro_batches, c.in_backward);
      results.push_back(read_all(engine));
      OSP_OK(osp_engine_destroy(engine));
    }
    EXPECT_TRUE(same_bits(results[0], results[1]));
    expect_nothing_left();
  }
}

TEST_F(CApiGpu, ACheckpointGoesOnOnAnotherDevice) {
  const std::string text = configuration("gradient_accumulation_steps: 2\n");
  std::optional<ProgramGpu> gpu(std::in_place, 0);
  std::vector<std::vector<float>> results;
  for (const bool changes : {false, true}) {
    const std::string out = (root_ / (changes ? "changed" : "same")).string();
    osp_engine_t engine = make(text, on(changes ? "cuda:0" : "host"));
    train(engine, changes ? &*gpu : nullptr, 1, 2, 2, false);
    OSP_OK(osp_checkpoint_save(engine, out.c_str(), nullptr));
    OSP_OK(osp_checkpoint_wait(engine));
    OSP_OK(osp_engine_destroy(engine));
    engine = make(text, on(changes ? "host" : "cuda:0"));
    OSP_OK(osp_checkpoint_load(engine, out.c_str()));
    train(engine, changes ? nullptr : &*gpu, 3, 2, 2, false);
    results.push_back(read_all(engine));
    OSP_OK(osp_engine_destroy(engine));
  }
  EXPECT_TRUE(same_bits(results[0], results[1]));
}

/// The first tensor of each layer as the program reads it in each step's forward.
std::vector<std::vector<float>> weights_that_are_read(osp_engine_t engine, ProgramGpu* gpu,
                                                      bool in_backward) {
  std::vector<std::vector<float>> all;
  std::vector<const void*> copies;
  for (uint64_t step = 1; step <= 4; ++step) {
    osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
    options.learning_rate = 1e-1;
    if (in_backward) {
      EXPECT_EQ(osp_step_begin(engine, &options), OSP_SUCCESS);
    }
    for (uint32_t l = 0; l < 3; ++l) {
      void* const stream = gpu == nullptr ? nullptr : gpu->stream(l);
      const uint64_t count = small_layers()[l][0].count();
      const void* weights[2] = {};
      EXPECT_EQ(osp_acquire(engine, l, stream, weights, 2), OSP_SUCCESS);
      all.emplace_back(count);
      if (gpu == nullptr) {
        std::memcpy(all.back().data(), weights[0], count * sizeof(float));
      } else {  // much later than the call returns
        copies.push_back(gpu->take(count * sizeof(float)));
        gpu->device().copy_on(stream, const_cast<void*>(copies.back()), weights[0],
                              count * sizeof(float));
      }
      EXPECT_EQ(osp_release(engine, l, stream), OSP_SUCCESS);
    }
    for (uint32_t l = 3; l-- > 0;) {
      const auto& tensors = small_layers()[l];
      for (uint32_t t = 0; t < tensors.size(); ++t) {
        if (tensors[t].frozen) continue;
        std::vector<float> values(tensors[t].count());
        for (uint64_t i = 0; i < values.size(); ++i) values[i] = random_normal(step + l + t, i);
        EXPECT_EQ(
            osp_submit_gradient(engine, l, t, gpu ? gpu->give(values) : values.data(), OSP_FLOAT32,
                                values.size(), gpu ? gpu->stream(l + t) : nullptr),
            OSP_SUCCESS);
      }
    }
    EXPECT_EQ(osp_step(engine, in_backward ? nullptr : &options), OSP_SUCCESS);
  }
  for (size_t i = 0; i < copies.size(); ++i) all[i] = gpu->get<float>(copies[i], all[i].size());
  return all;
}

TEST_F(CApiGpu, WeightsStayUntilTheProgramsStreamHasReadThem) {
  for (const bool in_backward : {false, true}) {
    for (const char* place : {"  prefetch_depth: 0\n", "  prefetch_depth: 1\n", "device"}) {
      SCOPED_TRACE(std::string(place) + (in_backward ? " in_backward" : " next_forward"));
      const std::string update = in_backward ? "  update: in_backward\n" : "";
      std::string text = configuration("max_grad_norm: 0\n", update);
      if (std::string(place) != "device") {
        text += place;
      } else {
        for (const char* home : {"weights: nvme", "optimizer: nvme"}) {
          text.replace(text.find(home), std::strlen(home),
                       std::string(home, std::strchr(home, ' ')) + " device");
        }
      }
      configure_fake(400);
      const osp_engine_t host = make(text, on("host"));
      const auto wanted = weights_that_are_read(host, nullptr, in_backward);
      OSP_OK(osp_engine_destroy(host));
      ProgramGpu gpu(0);
      const osp_engine_t engine = make(text, on("cuda:0"));
      const auto found = weights_that_are_read(engine, &gpu, in_backward);
      ASSERT_EQ(wanted.size(), found.size());
      for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(same_bits(wanted[i], found[i])) << i;
      OSP_OK(osp_engine_destroy(engine));
    }
    configure_fake(20);
  }
}

TEST_F(CApiGpu, AHeldLayerIsUpdatedBehindTheStreamThatHoldsIt) {
  constexpr uint32_t kLayer = 1;
  const uint64_t bytes = small_layers()[kLayer][0].count() * sizeof(float);
  for (const char* home : {"nvme", "device"}) {
    SCOPED_TRACE(home);
    configure_fake(400);
    ProgramGpu gpu(0);
    std::string text = configuration("max_grad_norm: 0\n");
    for (const std::string kind : {"weights: ", "optimizer: "}) {
      text.replace(text.find(kind), kind.size() + 4, kind + home);
    }
    const osp_engine_t engine = make(text, on("cuda:0"));
    ASSERT_NE(engine, nullptr);
    const std::vector<float> before = read(engine, "block.weight", bytes / sizeof(float));
    const void* weights[2] = {};
    OSP_OK(osp_acquire(engine, kLayer, gpu.stream(0), weights, 2));
    std::byte *const copy = gpu.take(bytes), *const other = gpu.take(bytes);
    for (uint64_t step = 1; step <= 2; ++step) {
      // What the program has put there takes longer than an update.
      for (int i = 0; i < 200; ++i) gpu.device().copy_on(gpu.stream(0), other, weights[0], bytes);
      if (step == 2) gpu.device().copy_on(gpu.stream(0), copy, weights[0], bytes);
      for (uint32_t l = 3; l-- > 0;) {
        const auto& tensors = small_layers()[l];
        for (uint32_t t = 0; t < tensors.size(); ++t) {
          if (tensors[t].frozen) continue;
          const std::vector<float> values = gradient(step * 100 + l * 10 + t, tensors[t].count());
          OSP_OK(osp_submit_gradient(engine, l, t, gpu.give(values), OSP_FLOAT32, values.size(),
                                     gpu.stream(1)));
        }
      }
      osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
      options.learning_rate = 1e-1;
      OSP_OK(osp_step(engine, &options));
    }
    OSP_OK(osp_release(engine, kLayer, gpu.stream(0)));
    // The first step's update comes with the second one's gradient, which comes behind the copy.
    EXPECT_TRUE(same_bits(before, gpu.get<float>(copy, before.size())));
    EXPECT_FALSE(same_bits(before, read(engine, "block.weight", before.size())));
    OSP_OK(osp_engine_destroy(engine));
  }
}

TEST_F(CApiGpu, ActivationsPassOnTheProgramsStreams) {
  constexpr uint64_t kBytes = 40000, kPlace = 40960, kCount = kBytes / sizeof(uint16_t);
  for (const bool all_full : {false, true}) {
    configure_fake(200);
    ProgramGpu gpu(2);
    osp_engine_options_t options = on("cuda:2");
    options.activation_host_bytes = 3 * kPlace;
    options.activation_nvme_bytes = (all_full ? 5 : 20) * kPlace;
    const osp_engine_t engine = make(configuration(), options);
    ASSERT_NE(engine, nullptr);
    std::byte* const buffer = gpu.take(kBytes);
    std::vector<osp_activation_t> saved(8);
    std::vector<const void*> originals, restored;
    for (uint64_t i = 0; i < saved.size(); ++i) {
      std::vector<uint16_t> values(kCount);
      for (uint64_t j = 0; j < kCount; ++j) values[j] = static_cast<uint16_t>(i * 7919 + j);
      originals.push_back(gpu.give(values));
      // One buffer for all: it is the program's again in the order of the stream.
      gpu.device().copy_on(gpu.stream(0), buffer, originals[i], kBytes);
      OSP_OK(osp_activation_save(engine, buffer, kBytes, gpu.stream(0), &saved[i]));
    }
    if (!all_full) {
      OSP_OK(osp_activation_discard(engine, saved.back()));
      saved.pop_back();
      std::ranges::reverse(saved);
      originals.pop_back();
      std::ranges::reverse(originals);
    }
    for (uint64_t i = 0; i < saved.size(); ++i) {
      if (i + 1 < saved.size()) {
        OSP_EXPECT(OSP_SUCCESS, osp_activation_prefetch(engine, saved[i + 1]));
      }
      std::byte* const back = gpu.take(kBytes);
      OSP_OK(osp_activation_restore(engine, saved[i], back, kBytes, gpu.stream(i)));
      restored.push_back(back);
    }
    for (uint64_t i = 0; i < saved.size(); ++i) {
      EXPECT_EQ(gpu.get<uint16_t>(originals[i], kCount), gpu.get<uint16_t>(restored[i], kCount));
    }
    osp_statistics_t statistics = OSP_STATISTICS_INIT;
    OSP_OK(osp_get_statistics(engine, &statistics));
    EXPECT_EQ(statistics.activation_bytes_saved, 8 * kBytes);
    // Where all is full, one may have to go for another that is prefetched.
    EXPECT_GE(statistics.activation_bytes_spilled, 5 * kBytes);
    EXPECT_TRUE(all_full || statistics.activation_bytes_spilled == 5 * kBytes);
    OSP_OK(osp_engine_destroy(engine));
  }
}

TEST_F(CApiGpu, WhatDoesNotComeCountsAsZero) {
  std::vector<std::vector<float>> results;
  for (const bool on_gpu : {false, true}) {
    std::optional<ProgramGpu> gpu;
    if (on_gpu) gpu.emplace(0);
    const osp_engine_t engine = make(configuration(), on(on_gpu ? "cuda:0" : "host"));
    train(engine, on_gpu ? &*gpu : nullptr, 1, 1, 1, false);  // slots hold something
    const std::vector<float> bias = gradient(5, 64);
    OSP_OK(osp_submit_gradient(engine, 1, 1, on_gpu ? gpu->give(bias) : bias.data(), OSP_FLOAT32,
                               bias.size(), on_gpu ? gpu->stream(0) : nullptr));
    OSP_OK(osp_gradients_done(engine, 1));
    OSP_OK(osp_gradients_done(engine, 0));
    osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
    options.learning_rate = 1e-2;
    options.allow_missing = 1;
    OSP_OK(osp_step(engine, &options));
    results.push_back(read_all(engine));
    OSP_OK(osp_engine_destroy(engine));
  }
  EXPECT_TRUE(same_bits(results[0], results[1]));
}

}  // namespace
}  // namespace overspill
