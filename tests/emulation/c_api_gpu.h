// What tests of the C API on the emulated GPU share: engines there, and steps of a program whose
// gradients are on two streams.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "engine/base/dtype.h"
#include "tests/emulation/fake_runtime_access.h"
#include "tests/emulation/program_gpu.h"
#include "tests/unit/bindings/c/small_engine.h"

namespace overspill::test {

inline bool same_bits(const std::vector<float>& left, const std::vector<float>& right) {
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

}  // namespace overspill::test
