// What a program does wrong has a name, a message, and no effect.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tests/unit/bindings/c/small_engine.h"

namespace overspill {
namespace {

using namespace test;

class CApiMisuse : public SmallEngineTest {};

TEST_F(CApiMisuse, EveryStatusHasItsName) {
  EXPECT_STREQ(osp_status_string(OSP_SUCCESS), "OSP_SUCCESS");
  EXPECT_STREQ(osp_status_string(OSP_ERROR_NO_SLOT), "OSP_ERROR_NO_SLOT");
  EXPECT_STREQ(osp_status_string(static_cast<osp_status_t>(99)), "OSP_ERROR_UNKNOWN");
  EXPECT_EQ(osp_version(), 100u);
}

TEST_F(CApiMisuse, CreatingRefusesWhatCannotBe) {
  osp_engine_t engine = nullptr;
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_engine_create("", nullptr, nullptr));
  const auto refuses = [&](osp_status_t status, const char* text,
                           const std::function<void(osp_engine_options_t&)>& change) {
    osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
    change(options);
    OSP_EXPECT(status, osp_engine_create(text, &options, &engine)) << text;
    EXPECT_EQ(engine, nullptr);
  };
  const auto as_is = [](osp_engine_options_t&) {};
  refuses(OSP_ERROR_INVALID_CONFIG, "precision: float16", as_is);
  refuses(OSP_ERROR_INVALID_CONFIG, "precison: bf16", as_is);
  refuses(OSP_ERROR_INVALID_CONFIG, "sequence_len: 128", as_is);
  EXPECT_TRUE(std::string(osp_last_error()).find("sequence_len") != std::string::npos);
  refuses(OSP_ERROR_INVALID_CONFIG, "[1, 2", as_is);
  refuses(OSP_ERROR_INVALID_CONFIG, "just text", as_is);
  refuses(OSP_ERROR_INVALID_CONFIG, "offload: {update: in_backward}", as_is);
  refuses(OSP_ERROR_INVALID_ARGUMENT, "", [](auto& o) { o.size = 0; });
  refuses(OSP_ERROR_INVALID_ARGUMENT, "", [](auto& o) { o.held_layers = 0; });
  refuses(OSP_ERROR_INVALID_ARGUMENT, "", [](auto& o) { o.rank = 1; });
  refuses(OSP_ERROR_INVALID_ARGUMENT, "", [](auto& o) { o.device = "tpu"; });
  refuses(OSP_ERROR_UNSUPPORTED, "", [](auto& o) { o.device = "cuda:0"; });
  refuses(OSP_ERROR_INVALID_ARGUMENT, "", [](auto& o) { o.master_address = "nowhere"; });
  refuses(OSP_ERROR_INVALID_ARGUMENT, "", [](auto& o) { o.loop = static_cast<osp_loop_t>(7); });
}

TEST_F(CApiMisuse, JsonIsAConfiguration) {
  osp_engine_t engine = nullptr;
  OSP_OK(osp_engine_create(R"({"precision": "float32", "offload": {"host_memory": "1GiB"}})",
                           nullptr, &engine));
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiMisuse, HandlesEndWithTheirEngine) {
  osp_engine_t engine = make(configuration());
  OSP_OK(osp_engine_destroy(engine));
  uint32_t layer = 0;
  size_t needed = 0;
  int32_t done = 0;
  void* memory = nullptr;
  const osp_step_options_t step = OSP_STEP_OPTIONS_INIT;
  const osp_tensor_t tensor = OSP_TENSOR_INIT;
  osp_statistics_t statistics = OSP_STATISTICS_INIT;
  float value = 0;
  for (const osp_engine_t gone : {engine, osp_engine_t{nullptr}}) {
    const osp_status_t bad = OSP_ERROR_INVALID_HANDLE;
    OSP_EXPECT(bad, osp_layer_register(gone, "l", &tensor, 1, &layer));
    OSP_EXPECT(bad, osp_set_order(gone, &layer, 1));
    OSP_EXPECT(bad, osp_finalize(gone, nullptr));
    OSP_EXPECT(bad, osp_describe_plan(gone, nullptr, 0, &needed));
    OSP_EXPECT(bad, osp_load_weights(gone, "x"));
    OSP_EXPECT(bad, osp_tensor_read(gone, "x", &value, OSP_FLOAT32, 1));
    OSP_EXPECT(bad, osp_acquire(gone, 0, nullptr, nullptr, 0));
    OSP_EXPECT(bad, osp_release(gone, 0, nullptr));
    OSP_EXPECT(bad, osp_submit_gradient(gone, 0, 0, &value, OSP_FLOAT32, 1, nullptr));
    OSP_EXPECT(bad, osp_step(gone, &step));
    OSP_EXPECT(bad, osp_step_poll(gone, &done, nullptr));
    OSP_EXPECT(bad, osp_checkpoint_save(gone, "x", nullptr));
    OSP_EXPECT(bad, osp_get_statistics(gone, &statistics));
    OSP_EXPECT(bad, osp_memory_allocate(gone, 1, -1, &memory));
  }
  OSP_EXPECT(OSP_ERROR_INVALID_HANDLE, osp_engine_destroy(engine));
  OSP_EXPECT(OSP_SUCCESS, osp_engine_destroy(nullptr));
}

TEST_F(CApiMisuse, RegisteringRefusesAndKeepsNothing) {
  osp_engine_t engine = nullptr;
  OSP_OK(osp_engine_create("precision: float32", nullptr, &engine));
  const uint64_t shape[2] = {4, 4}, zero[2] = {4, 0}, huge[2] = {UINT64_MAX, 2};
  osp_tensor_t good = OSP_TENSOR_INIT;
  good.name = "w";
  good.shape = shape;
  good.rank = 2;
  const auto refuses = [&](osp_status_t status, const std::function<void(osp_tensor_t&)>& change) {
    osp_tensor_t tensor = good;
    change(tensor);
    OSP_EXPECT(status, osp_layer_register(engine, "layer", &tensor, 1, nullptr));
  };
  const osp_status_t argument = OSP_ERROR_INVALID_ARGUMENT;
  OSP_EXPECT(argument, osp_layer_register(engine, nullptr, &good, 1, nullptr));
  OSP_EXPECT(argument, osp_layer_register(engine, "", &good, 1, nullptr));
  OSP_EXPECT(argument, osp_layer_register(engine, "layer", nullptr, 1, nullptr));
  OSP_EXPECT(argument, osp_layer_register(engine, "layer", &good, 0, nullptr));
  refuses(argument, [](auto& t) { t.size = 0; });
  refuses(argument, [](auto& t) { t.name = nullptr; });
  refuses(argument, [](auto& t) { t.name = ""; });
  refuses(argument, [](auto& t) { t.shape = nullptr; });
  refuses(argument, [&](auto& t) { t.shape = zero; });
  refuses(argument, [&](auto& t) { t.shape = huge; });
  refuses(argument, [](auto& t) { t.rank = 1000; });
  refuses(argument, [](auto& t) { t.decay = 2; });
  refuses(argument, [](auto& t) { t.group = UINT32_MAX; });
  refuses(OSP_ERROR_DTYPE_MISMATCH, [](auto& t) { t.dtype = OSP_BFLOAT16; });
  refuses(OSP_ERROR_DTYPE_MISMATCH, [](auto& t) { t.dtype = static_cast<osp_dtype_t>(9); });
  const osp_tensor_t twice[2] = {good, good};
  OSP_EXPECT(OSP_ERROR_DUPLICATE_NAME, osp_layer_register(engine, "layer", twice, 2, nullptr));
  uint32_t layer = 7;
  OSP_OK(osp_layer_register(engine, "layer", &good, 1, &layer));
  EXPECT_EQ(layer, 0u);
  OSP_EXPECT(OSP_ERROR_DUPLICATE_NAME, osp_layer_register(engine, "other", &good, 1, nullptr));
  good.name = "v";
  OSP_EXPECT(OSP_ERROR_DUPLICATE_NAME, osp_layer_register(engine, "layer", &good, 1, nullptr));
  layer = 1;
  OSP_EXPECT(argument, osp_set_order(engine, &layer, 1));
  OSP_EXPECT(OSP_ERROR_NOT_FINALIZED, osp_acquire(engine, 0, nullptr, nullptr, 0));
  OSP_OK(osp_finalize(engine, nullptr));
  OSP_EXPECT(OSP_ERROR_ALREADY_FINALIZED, osp_layer_register(engine, "b", &good, 1, nullptr));
  OSP_EXPECT(OSP_ERROR_ALREADY_FINALIZED, osp_finalize(engine, nullptr));
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiMisuse, FinalizingRefusesUnknownTiesAndSmallBudgets) {
  osp_engine_t engine = nullptr;
  OSP_OK(osp_engine_create("", nullptr, &engine));
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_finalize(engine, nullptr));
  const uint64_t shape[1] = {4};
  osp_tensor_t tensor = OSP_TENSOR_INIT;
  tensor.name = "w";
  tensor.shape = shape;
  tensor.rank = 1;
  OSP_OK(osp_layer_register(engine, "a", &tensor, 1, nullptr));
  tensor.name = "t";
  tensor.tied_to = "nothing";
  OSP_OK(osp_layer_register(engine, "b", &tensor, 1, nullptr));
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_finalize(engine, nullptr));
  OSP_EXPECT(OSP_ERROR_NOT_FINALIZED, osp_flush(engine));
  OSP_OK(osp_engine_destroy(engine));

  OSP_OK(osp_engine_create("offload: {device_memory: 4KiB}", nullptr, &engine));
  register_all(engine);
  OSP_EXPECT(OSP_ERROR_DOES_NOT_FIT, osp_finalize(engine, nullptr));
  EXPECT_TRUE(std::string(osp_last_error()).find("offload.device_memory") != std::string::npos);
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiMisuse, WhatIsRefusedInFinalizingCanBeMended) {
  osp_engine_t engine = nullptr;
  OSP_OK(osp_engine_create("precision: float32", nullptr, &engine));
  const uint64_t shape[1] = {4};
  osp_tensor_t tied = OSP_TENSOR_INIT, owner = OSP_TENSOR_INIT;
  tied.name = "tied";
  owner.name = tied.tied_to = "owner";
  tied.shape = owner.shape = shape;
  tied.rank = owner.rank = 1;
  tied.frozen = 1;
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_layer_register(engine, "a", &tied, 1, nullptr));
  tied.frozen = 0;
  OSP_OK(osp_layer_register(engine, "a", &tied, 1, nullptr));
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_finalize(engine, nullptr));
  OSP_OK(osp_layer_register(engine, "b", &owner, 1, nullptr));
  OSP_OK(osp_finalize(engine, nullptr));
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiMisuse, MoreLayersThanFitAreNotHeld) {
  constexpr uint32_t kLayers = 5;
  constexpr uint64_t kCount = 64;
  const std::vector<std::string> names = {"a", "b", "c", "d", "e"};
  const std::vector<float> ones(kCount, 1);
  for (const uint32_t held : {1u, UINT32_MAX}) {
    osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
    options.held_layers = held;
    osp_engine_t engine = nullptr;
    OSP_OK(
        osp_engine_create(configuration("", "  prefetch_depth: 1\n").c_str(), &options, &engine));
    for (const std::string& name : names) {
      osp_tensor_t tensor = OSP_TENSOR_INIT;
      tensor.name = name.c_str();
      tensor.shape = &kCount;
      tensor.rank = 1;
      OSP_OK(osp_layer_register(engine, name.c_str(), &tensor, 1, nullptr));
    }
    OSP_OK(osp_finalize(engine, nullptr));
    OSP_OK(osp_initialize_weights(engine, 1, 0.1));
    osp_step_options_t rates = OSP_STEP_OPTIONS_INIT;
    rates.learning_rate = 1e-2;
    for (int step = 0; step < 2; ++step) {
      OSP_OK(osp_acquire(engine, 0, nullptr, nullptr, 0));
      for (uint32_t layer = 1; layer < kLayers; ++layer) {  // the first one is there, prefetched
        OSP_EXPECT(held == 1 ? OSP_ERROR_NO_SLOT : OSP_SUCCESS,
                   osp_acquire(engine, layer, nullptr, nullptr, 0));
      }
      for (uint32_t layer = kLayers; layer-- > 0;) {  // an update needs a place
        OSP_OK(osp_submit_gradient(engine, layer, 0, ones.data(), OSP_FLOAT32, kCount, nullptr));
      }
      OSP_OK(osp_step(engine, &rates));
      OSP_OK(osp_release(engine, 0, nullptr));
      for (uint32_t layer = 1; held != 1 && layer < kLayers; ++layer) {
        OSP_OK(osp_release(engine, layer, nullptr));
      }
    }
    OSP_OK(osp_engine_destroy(engine));
  }
}

/// Everything that can be done wrong between the calls of a step, each time refused by its name.
void do_all_wrong(osp_engine_t engine, bool held) {
  float value = 0;
  const void* weights[2] = {};
  const auto argument = OSP_ERROR_INVALID_ARGUMENT;
  OSP_EXPECT(argument, osp_acquire(engine, 9, nullptr, nullptr, 0));
  OSP_EXPECT(argument, osp_acquire(engine, 2, nullptr, nullptr, 2));
  OSP_EXPECT(argument, osp_acquire(engine, 2, &value, weights, 2));
  OSP_EXPECT(OSP_ERROR_SIZE_MISMATCH, osp_acquire(engine, 2, nullptr, weights, 1));
  OSP_EXPECT(argument, osp_prefetch(engine, 9));
  OSP_EXPECT(argument, osp_release(engine, 9, nullptr));
  OSP_EXPECT(OSP_ERROR_NOT_ACQUIRED, osp_release(engine, 2, nullptr));
  const auto submit = [&](uint32_t layer, uint32_t tensor, const void* values, int type,
                          uint64_t count, void* stream = nullptr) {
    return osp_submit_gradient(engine, layer, tensor, values, static_cast<osp_dtype_t>(type), count,
                               stream);
  };
  OSP_EXPECT(argument, submit(9, 0, &value, OSP_FLOAT32, 1));
  OSP_EXPECT(argument, submit(1, 2, &value, OSP_FLOAT32, 1));
  OSP_EXPECT(argument, submit(1, 1, nullptr, OSP_FLOAT32, 64));
  OSP_EXPECT(argument, submit(1, 1, &value, OSP_FLOAT32, 64, &value));
  OSP_EXPECT(OSP_ERROR_FROZEN, submit(0, 1, &value, OSP_FLOAT32, 64));
  OSP_EXPECT(OSP_ERROR_SIZE_MISMATCH, submit(1, 1, &value, OSP_FLOAT32, 63));
  OSP_EXPECT(OSP_ERROR_DTYPE_MISMATCH, submit(1, 1, &value, 9, 64));
  OSP_EXPECT(OSP_ERROR_SIZE_MISMATCH,
             osp_submit_gradients(engine, 1, &value, OSP_FLOAT32, 1, nullptr));
  osp_step_options_t step = OSP_STEP_OPTIONS_INIT;
  OSP_EXPECT(argument, osp_step(engine, nullptr));
  OSP_EXPECT(argument, osp_step_begin(engine, &step));
  step.learning_rate = NAN;
  OSP_EXPECT(argument, osp_step(engine, &step));
  step.learning_rate = 1;
  step.loss_scale = 0;
  OSP_EXPECT(argument, osp_step(engine, &step));
  OSP_EXPECT(argument, osp_step_poll(engine, nullptr, nullptr));
  OSP_EXPECT(OSP_ERROR_UNKNOWN_TENSOR, osp_tensor_write(engine, "x", &value, OSP_FLOAT32, 1));
  OSP_EXPECT(OSP_ERROR_SIZE_MISMATCH,
             osp_tensor_write(engine, "block.bias", &value, OSP_FLOAT32, 1));
  OSP_EXPECT(argument, osp_tensor_read(engine, "block.bias", nullptr, OSP_FLOAT32, 64));
  OSP_EXPECT(argument, osp_initialize_weights(engine, 1, -1));
  OSP_EXPECT(argument, osp_export_weights(engine, nullptr, nullptr));
  OSP_EXPECT(argument, osp_trace_write(engine, nullptr));
  OSP_EXPECT(argument, osp_trace_write(engine, "/nonexistent/trace.json"));
  OSP_EXPECT(argument, osp_activation_discard(engine, 5));
  OSP_EXPECT(argument, osp_activation_restore(engine, 0, &value, 4, nullptr));
  osp_activation_t saved = 0;
  OSP_EXPECT(argument, osp_activation_save(engine, &value, 0, nullptr, &saved));
  OSP_EXPECT(OSP_ERROR_DOES_NOT_FIT, osp_activation_save(engine, &value, 4, nullptr, &saved));
  void* memory = nullptr;
  OSP_EXPECT(argument, osp_memory_allocate(engine, 0, -1, &memory));
  OSP_EXPECT(argument, osp_memory_allocate(engine, 4096, -2, &memory));
  OSP_EXPECT(argument, osp_memory_allocate(engine, 4096, 1000, &memory));
  OSP_EXPECT(OSP_ERROR_DOES_NOT_FIT, osp_memory_allocate(engine, UINT64_MAX, -1, &memory));
  OSP_EXPECT(argument, osp_memory_free(engine, &value));
  if (!held) {
    OSP_EXPECT(OSP_ERROR_NOT_FOUND, osp_checkpoint_load(engine, "/nonexistent"));
    OSP_EXPECT(OSP_ERROR_NOT_FOUND, osp_load_weights(engine, "/nonexistent"));
    return;
  }
  const auto released = OSP_ERROR_LAYERS_HELD;
  OSP_EXPECT(released, osp_flush(engine));
  OSP_EXPECT(released, osp_initialize_weights(engine, 1, 0.1));
  OSP_EXPECT(released, osp_load_weights(engine, "/nonexistent"));
  OSP_EXPECT(released, osp_checkpoint_save(engine, "/nonexistent", nullptr));
  OSP_EXPECT(released, osp_checkpoint_load(engine, "/nonexistent"));
  OSP_EXPECT(released, osp_export_weights(engine, "/nonexistent", nullptr));
  std::vector<float> bias(64);
  OSP_EXPECT(released, osp_tensor_read(engine, "block.bias", bias.data(), OSP_FLOAT32, 64));
}

TEST_F(CApiMisuse, NothingThatIsRefusedChangesTheRun) {
  osp_engine_t right = make(configuration()), wrong = make(configuration());
  OSP_EXPECT(OSP_ERROR_STEP_NOT_STARTED, osp_step_wait(wrong, nullptr));
  for (uint64_t key = 1; key < 3; ++key) {
    step(right, key);
    for (uint32_t layer = 0; layer < 3; ++layer) use(wrong, layer);
    OSP_EXPECT(OSP_ERROR_GRADIENT_MISSING, [&] {
      osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
      return osp_step(wrong, &options);
    }());
    for (uint32_t layer = 3; layer-- > 0;) {
      const void* weights[2] = {};
      if (layer < 2) {
        OSP_OK(osp_acquire(wrong, layer, nullptr, weights, 2));
        OSP_EXPECT(OSP_ERROR_ALREADY_ACQUIRED, osp_acquire(wrong, layer, nullptr, weights, 2));
      }
      do_all_wrong(wrong, layer < 2);
      submit(wrong, layer, key);
      if (layer < 2) {
        OSP_EXPECT(OSP_ERROR_GRADIENT_COMPLETE, osp_gradients_done(wrong, layer));
        const std::vector<float> bias(64);
        if (layer == 1) {
          OSP_EXPECT(OSP_ERROR_GRADIENT_COMPLETE,
                     osp_submit_gradient(wrong, 1, 1, bias.data(), OSP_FLOAT32, 64, nullptr));
        }
        OSP_OK(osp_release(wrong, layer, nullptr));
        OSP_EXPECT(OSP_ERROR_NOT_ACQUIRED, osp_release(wrong, layer, nullptr));
      }
    }
    osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
    options.learning_rate = 1e-2;
    OSP_OK(osp_step(wrong, &options));
    osp_step_result_t left = OSP_STEP_RESULT_INIT, other = OSP_STEP_RESULT_INIT;
    OSP_OK(osp_step_wait(right, &left));
    OSP_OK(osp_step_wait(wrong, &other));
    EXPECT_EQ(left.gradient_norm, other.gradient_norm);
    EXPECT_EQ(left.updates, key);
  }
  EXPECT_EQ(read_all(right), read_all(wrong));
  OSP_OK(osp_engine_destroy(right));
  OSP_OK(osp_engine_destroy(wrong));
}

/// Layers of a vector each, named by their number.
osp_engine_t vectors(const std::string& configuration, uint32_t layers, osp_loop_t loop) {
  osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
  options.loop = loop;
  options.log = [](void*, osp_log_level_t, const char*) {};
  osp_engine_t engine = nullptr;
  EXPECT_TRUE(status_is(osp_engine_create(configuration.c_str(), &options, &engine), OSP_SUCCESS));
  const uint64_t shape[1] = {64};
  for (uint32_t l = 0; l < layers; ++l) {
    const std::string name = std::to_string(l);
    osp_tensor_t tensor = OSP_TENSOR_INIT;
    tensor.name = name.c_str();
    tensor.shape = shape;
    tensor.rank = 1;
    EXPECT_TRUE(
        status_is(osp_layer_register(engine, name.c_str(), &tensor, 1, nullptr), OSP_SUCCESS));
  }
  EXPECT_TRUE(status_is(osp_finalize(engine, nullptr), OSP_SUCCESS));
  EXPECT_TRUE(status_is(osp_initialize_weights(engine, 7, 0.1), OSP_SUCCESS));
  return engine;
}

TEST_F(CApiMisuse, LayersBeyondTheSlotsAreRefused) {
  osp_engine_t engine =
      vectors(configuration("", "  prefetch_depth: 0\n"), 4, OSP_LOOP_MICRO_BATCH_MAJOR);
  const void* weights[1] = {};
  OSP_OK(osp_acquire(engine, 1, nullptr, weights, 1));
  OSP_EXPECT(OSP_ERROR_NO_SLOT, osp_acquire(engine, 2, nullptr, weights, 1));
  OSP_OK(osp_release(engine, 1, nullptr));
  OSP_OK(osp_acquire(engine, 2, nullptr, weights, 1));
  OSP_OK(osp_release(engine, 2, nullptr));
  OSP_OK(osp_engine_destroy(engine));
}

TEST_F(CApiMisuse, LayerMajorLoopsCompleteAGradientBeforeTheNext) {
  const std::string text = configuration("gradient_accumulation_steps: 2\n");
  const std::vector<float> values(64);
  for (const osp_loop_t loop : {OSP_LOOP_LAYER_MAJOR, OSP_LOOP_MICRO_BATCH_MAJOR}) {
    osp_engine_t engine = vectors(text, 4, loop);
    const auto submit = [&](uint32_t layer) {
      return osp_submit_gradient(engine, layer, 0, values.data(), OSP_FLOAT32, 64, nullptr);
    };
    for (const uint32_t layer : {0, 1}) OSP_EXPECT(OSP_SUCCESS, submit(layer));
    const osp_status_t third = submit(2);
    EXPECT_EQ(third, loop == OSP_LOOP_LAYER_MAJOR ? OSP_ERROR_NO_SLOT : OSP_SUCCESS);
    OSP_EXPECT(OSP_SUCCESS, submit(0));
    OSP_EXPECT(OSP_ERROR_GRADIENT_COMPLETE, submit(0));
    OSP_OK(osp_engine_destroy(engine));
  }
}

TEST_F(CApiMisuse, UpdatesInTheBackwardNeedABeginning) {
  osp_engine_t engine = make(configuration("max_grad_norm: 0\n", "  update: in_backward\n"));
  const std::vector<float> values(64);
  OSP_EXPECT(OSP_ERROR_STEP_NOT_STARTED,
             osp_submit_gradient(engine, 1, 1, values.data(), OSP_FLOAT32, 64, nullptr));
  OSP_EXPECT(OSP_ERROR_STEP_NOT_STARTED, osp_gradients_done(engine, 1));
  OSP_EXPECT(OSP_ERROR_STEP_NOT_STARTED, osp_step(engine, nullptr));
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_step_begin(engine, nullptr));
  step(engine, 1, true);
  OSP_OK(osp_engine_destroy(engine));
}

}  // namespace
}  // namespace overspill
