// A small engine through overspill.h, for tests: three layers, of which the first has a frozen
// tensor and the last one is tied to the first, with made-up gradients.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "bindings/include/overspill.h"
#include "engine/base/random.h"
#include "tests/fault/disk_fixture.h"

namespace overspill::test {

inline testing::AssertionResult status_is(osp_status_t found, osp_status_t expected) {
  if (found == expected) return testing::AssertionSuccess();
  return testing::AssertionFailure() << osp_status_string(found) << " (" << osp_last_error()
                                     << "), not " << osp_status_string(expected);
}
#define OSP_EXPECT(status, call) EXPECT_TRUE(::overspill::test::status_is(call, status)) << #call
#define OSP_OK(call) ASSERT_TRUE(::overspill::test::status_is(call, OSP_SUCCESS)) << #call

struct SmallTensor {
  const char* name;
  std::vector<uint64_t> shape;
  bool frozen = false;
  const char* tied_to = nullptr;
  uint64_t count() const {
    uint64_t elements = 1;
    for (const uint64_t extent : shape) elements *= extent;
    return elements;
  }
};

inline const std::vector<std::vector<SmallTensor>>& small_layers() {
  static const std::vector<std::vector<SmallTensor>> layers = {
      {{"embed.weight", {100, 64}}, {"embed.scale", {64}, true}},
      {{"block.weight", {64, 192}}, {"block.bias", {64}}},
      {{"head.norm", {64}}, {"head.weight", {100, 64}, false, "embed.weight"}}};
  return layers;
}

class SmallEngineTest : public DiskTest {
 protected:
  std::string configuration(const std::string& more = "", const std::string& offload = "") const {
    return "precision: float32\n" + more +
           "offload:\n  device_memory: 4MiB\n  host_memory: 4MiB\n  weights: nvme\n"
           "  optimizer: nvme\n  nvme_paths: ['" +
           (root_ / "nvme").string() + "']\n" + offload;
  }

  static void register_all(osp_engine_t engine) {
    for (const auto& layer : small_layers()) {
      std::vector<osp_tensor_t> tensors;
      for (const SmallTensor& tensor : layer) {
        osp_tensor_t given = OSP_TENSOR_INIT;
        given.name = tensor.name;
        given.shape = tensor.shape.data();
        given.rank = static_cast<uint32_t>(tensor.shape.size());
        given.frozen = tensor.frozen ? 1 : 0;
        given.tied_to = tensor.tied_to;
        tensors.push_back(given);
      }
      const std::string name = std::string("layer of ") + layer[0].name;
      OSP_OK(osp_layer_register(engine, name.c_str(), tensors.data(), tensors.size(), nullptr));
    }
  }

  osp_engine_t make(const std::string& text,
                    const osp_engine_options_t& options = OSP_ENGINE_OPTIONS_INIT) {
    osp_engine_options_t quiet = options;
    if (quiet.log == nullptr) quiet.log = [](void*, osp_log_level_t, const char*) {};
    osp_engine_t engine = nullptr;
    EXPECT_TRUE(status_is(osp_engine_create(text.c_str(), &quiet, &engine), OSP_SUCCESS));
    if (engine == nullptr) return engine;
    register_all(engine);
    EXPECT_TRUE(status_is(osp_finalize(engine, nullptr), OSP_SUCCESS));
    EXPECT_TRUE(status_is(osp_initialize_weights(engine, 7, 0.1), OSP_SUCCESS));
    return engine;
  }

  static std::vector<float> gradient(uint64_t key, uint64_t count) {
    std::vector<float> values(count);
    for (uint64_t i = 0; i < count; ++i) values[i] = random_normal(key, i);
    return values;
  }

  /// All gradients of a layer, once.
  static void submit(osp_engine_t engine, uint32_t layer, uint64_t key) {
    const auto& tensors = small_layers()[layer];
    for (uint32_t t = 0; t < tensors.size(); ++t) {
      if (tensors[t].frozen) continue;
      const std::vector<float> values = gradient(key * 100 + layer * 10 + t, tensors[t].count());
      OSP_OK(osp_submit_gradient(engine, layer, t, values.data(), OSP_FLOAT32, values.size(),
                                 nullptr));
    }
  }

  /// Forward, backward and the end of a step.
  static void step(osp_engine_t engine, uint64_t key, bool in_backward = false) {
    osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
    options.learning_rate = 1e-2;
    if (in_backward) {
      OSP_OK(osp_step_begin(engine, &options));
    }
    for (uint32_t layer = 0; layer < 3; ++layer) use(engine, layer);
    for (uint32_t layer = 3; layer-- > 0;) {
      use(engine, layer);
      submit(engine, layer, key);
    }
    OSP_OK(osp_step(engine, in_backward ? nullptr : &options));
  }
  static void use(osp_engine_t engine, uint32_t layer) {
    const void* weights[2] = {};
    OSP_OK(osp_acquire(engine, layer, nullptr, weights, 2));
    EXPECT_NE(weights[0], nullptr);
    EXPECT_NE(weights[1], nullptr);
    OSP_OK(osp_release(engine, layer, nullptr));
  }

  static std::vector<float> read(osp_engine_t engine, const char* name, uint64_t count) {
    std::vector<float> values(count);
    EXPECT_TRUE(
        status_is(osp_tensor_read(engine, name, values.data(), OSP_FLOAT32, count), OSP_SUCCESS));
    return values;
  }
  static std::vector<float> read_all(osp_engine_t engine) {
    std::vector<float> all;
    for (const auto& layer : small_layers()) {
      for (const SmallTensor& tensor : layer) {
        const std::vector<float> values = read(engine, tensor.name, tensor.count());
        all.insert(all.end(), values.begin(), values.end());
      }
    }
    return all;
  }
};

}  // namespace overspill::test
