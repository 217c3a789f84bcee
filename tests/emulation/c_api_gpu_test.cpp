// The C API with GPUs: another program's streams and memory, on the emulated one. What is not
// ordered by events comes in another order there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "engine/base/dtype.h"
#include "tests/emulation/fake_runtime_access.h"
#include "tests/emulation/program_gpu.h"
#include "tests/unit/bindings/c/small_engine.h"

namespace overspill {
namespace {

using namespace test;

bool same_bits(const std::vector<float>& left, const std::vector<float>& right) {
  return left.size() == right.size() &&
         std::memcmp(left.data(), right.data(), left.size() * sizeof(float)) == 0;
}

class CApiGpu : public SmallEngineTest {
 protected:
  void TearDown() override {
    configure_fake(20);
    SmallEngineTest::TearDown();
  }
  static void configure_fake(unsigned max_delay_us) {
    const FakeCudaSettings settings{.devices = 4, .max_delay_us = max_delay_us};
    FAKE_CUDA(fake_cuda_configure)(&settings);
  }
  static void expect_nothing_left() {
    const FakeCudaLive left = FAKE_CUDA(fake_cuda_live)();
    EXPECT_EQ(left.streams + left.events + left.allocations + left.registrations, 0u);
  }
  static osp_engine_options_t on(const char* device) {
    osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
    options.device = device;
    return options;
  }

  /// A made-up gradient in a type, and its bits.
  struct Values {
    osp_dtype_t type = OSP_FLOAT32;
    uint64_t count = 0;
    std::vector<float> wide;
    std::vector<uint16_t> narrow;
    const void* data() const {
      return type == OSP_FLOAT32 ? static_cast<const void*>(wide.data()) : narrow.data();
    }
    const void* on(ProgramGpu& gpu) const {
      return type == OSP_FLOAT32 ? gpu.give(wide) : gpu.give(narrow);
    }
  };
  static Values values_of(uint64_t key, uint64_t count) {
    Values values{.count = count, .wide = gradient(key, count), .narrow = {}};
    const std::array types = {OSP_FLOAT32, OSP_BFLOAT16, OSP_FLOAT16};
    values.type = types[key % types.size()];
    if (values.type == OSP_FLOAT32) return values;
    for (const float value : values.wide) {
      // Float16 of normal numbers around one: the exponent's bias, and a mantissa cut short.
      const uint32_t bits = std::bit_cast<uint32_t>(value);
      const uint32_t half = (bits >> 16 & 0x8000) | (((bits & 0x7fffffff) >> 13) - (112u << 10));
      const bool small = (bits & 0x7fffffff) < (113u << 23);
      values.narrow.push_back(values.type == OSP_BFLOAT16 ? float_to_bf16(value)
                              : small                     ? uint16_t{0x0001}
                                                          : static_cast<uint16_t>(half));
    }
    return values;
  }

  /// Steps on the host, or on a GPU with two streams; micro-batch by micro-batch.
  static void train(osp_engine_t engine, ProgramGpu* gpu, uint64_t first_step, uint64_t steps,
                    uint32_t micro_batches, bool in_backward) {
    for (uint64_t s = first_step; s < first_step + steps; ++s) {
      osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
      options.learning_rate = 1e-2;
      if (in_backward) {
        OSP_OK(osp_step_begin(engine, &options));
      }
      for (uint32_t mb = 0; mb < micro_batches; ++mb) pass(engine, gpu, s * 10 + mb);
      OSP_OK(osp_step(engine, in_backward ? nullptr : &options));
      if (gpu != nullptr) gpu->reset();
    }
    OSP_OK(osp_flush(engine));
  }
  static void pass(osp_engine_t engine, ProgramGpu* gpu, uint64_t key) {
    size_t turn = key;
    const auto stream = [&] { return gpu == nullptr ? nullptr : gpu->stream(turn++); };
    for (uint32_t l = 0; l < 3; ++l) use_on(engine, l, stream());
    for (uint32_t l = 3; l-- > 0;) {
      use_on(engine, l, stream());
      const auto& tensors = small_layers()[l];
      for (uint32_t t = 0; t < tensors.size(); ++t) {
        if (tensors[t].frozen) continue;
        const Values values = values_of(key * 100 + l * 10 + t, tensors[t].count());
        OSP_OK(osp_submit_gradient(engine, l, t, gpu ? values.on(*gpu) : values.data(), values.type,
                                   values.count, stream()));
      }
    }
  }
  static void use_on(osp_engine_t engine, uint32_t layer, void* stream) {
    const void* weights[2] = {};
    OSP_OK(osp_acquire(engine, layer, stream, weights, 2));
    OSP_OK(osp_release(engine, layer, stream));
  }
};

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

TEST_F(CApiGpu, MisuseIsNamedAndChangesNothing) {
  const auto refused = [&](const char* device, const char* offload, osp_status_t status,
                           const char* part) {
    const osp_engine_options_t options = on(device);
    osp_engine_t engine = nullptr;
    OSP_EXPECT(status, osp_engine_create(configuration("", offload).c_str(), &options, &engine));
    EXPECT_EQ(engine, nullptr);
    EXPECT_NE(std::string(osp_last_error()).find(part), std::string::npos) << osp_last_error();
  };
  refused("cuda:4", "", OSP_ERROR_INVALID_ARGUMENT, "CUDA shows 4 GPUs");
  refused("cuda:x", "", OSP_ERROR_INVALID_ARGUMENT, "accepted: host, cuda, cuda:N");
  refused("gpu", "", OSP_ERROR_INVALID_ARGUMENT, "accepted: host, cuda, cuda:N");
  refused("host", "  device: cuda\n", OSP_ERROR_INVALID_CONFIG, "remove one of them");
  refused("cuda:0", "  device: unified\n", OSP_ERROR_INVALID_CONFIG, "remove one of them");

  ProgramGpu gpu(0);
  const osp_engine_t host = make(configuration(), on("host"));
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_acquire(host, 0, gpu.stream(0), nullptr, 0));
  OSP_OK(osp_engine_destroy(host));

  const osp_engine_t engine = make(configuration("", "  device: cuda\n"), on(nullptr));
  const std::vector<float> before = read_all(engine), values = gradient(1, 64 * 192);
  OSP_EXPECT(
      OSP_ERROR_INVALID_ARGUMENT,
      osp_submit_gradient(engine, 1, 0, values.data(), OSP_FLOAT32, values.size(), gpu.stream(0)));
  EXPECT_NE(std::string(osp_last_error()).find("GPU 0 does not reach"), std::string::npos);
  osp_activation_t activation = 0;
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT,
             osp_activation_save(engine, values.data(), 64, gpu.stream(0), &activation));
  EXPECT_EQ(before, read_all(engine));
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiGpu, LeavesTheThreadItsGpuAndTakesNoMemoryAfterTheStart) {
  const auto set_device = fake_cuda<int(int)>("cudaSetDevice");
  const auto get_device = fake_cuda<int(int*)>("cudaGetDevice");
  std::optional<ProgramGpu> first(std::in_place, 1), second(std::in_place, 3);
  ASSERT_EQ(set_device(2), 0);
  const osp_engine_t one = make(configuration(), on("cuda:1"));
  const osp_engine_t three = make(configuration(), on("cuda:3"));
  void* memory = nullptr;
  OSP_OK(osp_memory_allocate(one, 5000, -1, &memory));
  EXPECT_EQ(FAKE_CUDA(fake_cuda_memory)(memory, 5000), kFakeCudaPinned);
  int now = -1;
  EXPECT_EQ(get_device(&now), 0);
  EXPECT_EQ(now, 2);

  const FakeCudaLive before = FAKE_CUDA(fake_cuda_live)();
  std::thread other([&] { train(three, &*second, 1, 2, 1, false); });
  train(one, &*first, 1, 2, 1, false);
  other.join();
  const FakeCudaLive after = FAKE_CUDA(fake_cuda_live)();
  EXPECT_EQ(before.allocations, after.allocations);
  EXPECT_EQ(before.registrations, after.registrations);
  EXPECT_EQ(before.streams, after.streams);
  EXPECT_TRUE(same_bits(read_all(one), read_all(three)));
  OSP_OK(osp_memory_free(one, memory));
  OSP_OK(osp_engine_destroy(one));
  OSP_OK(osp_engine_destroy(three));
  first.reset();
  second.reset();
  expect_nothing_left();
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

/// Up to the first call that fails.
osp_status_t step_of_zeros(osp_engine_t engine, const void* zeros, void* stream) {
  const auto use = [&](uint32_t layer) {
    const osp_status_t status = osp_acquire(engine, layer, stream, nullptr, 0);
    return status != OSP_SUCCESS ? status : osp_release(engine, layer, stream);
  };
  osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
  options.learning_rate = 1e-2;
  for (uint32_t l = 0; l < 3; ++l) {
    if (const osp_status_t status = use(l)) return status;
  }
  for (uint32_t l = 3; l-- > 0;) {
    if (const osp_status_t status = use(l)) return status;
    const auto& tensors = small_layers()[l];
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      if (tensors[t].frozen) continue;
      const osp_status_t status =
          osp_submit_gradient(engine, l, t, zeros, OSP_FLOAT32, tensors[t].count(), stream);
      if (status != OSP_SUCCESS) return status;
    }
  }
  return osp_step(engine, &options);
}

TEST_F(CApiGpu, ALostGpuEndsEveryCallWithOneError) {
  constexpr int kIllegalAddress = 700;
  for (const int work : {3, 40, 90}) {
    SCOPED_TRACE(work);
    {
      ProgramGpu gpu(0);
      const osp_engine_t engine = make(configuration(), on("cuda:0"));
      ASSERT_NE(engine, nullptr);
      std::byte* const zeros = gpu.take(64 * 192 * sizeof(float));
      gpu.device().zero_on(gpu.stream(0), zeros, 64 * 192 * sizeof(float));
      gpu.reset();
      FAKE_CUDA(fake_cuda_break_device)(0, kIllegalAddress, work);
      osp_status_t status = OSP_SUCCESS;
      for (int step = 0; step < 20 && status == OSP_SUCCESS; ++step) {
        status = step_of_zeros(engine, zeros, gpu.stream(0));
      }
      EXPECT_EQ(status, OSP_ERROR_IO);
      const std::string message = osp_last_error();
      EXPECT_NE(message.find("cudaErrorIllegalAddress"), std::string::npos) << message;
      OSP_EXPECT(OSP_ERROR_IO, osp_acquire(engine, 0, nullptr, nullptr, 0));
      EXPECT_EQ(osp_last_error(), message);
      OSP_EXPECT(OSP_ERROR_IO, osp_engine_destroy(engine));
    }
    expect_nothing_left();
    configure_fake(20);
  }
}

}  // namespace
}  // namespace overspill
