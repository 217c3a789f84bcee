// Calls from several threads at once: on engines of their own, and on one engine.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/unit/bindings/c/small_engine.h"

namespace overspill {
namespace {

using namespace test;

class CApiThreads : public SmallEngineTest {};

TEST_F(CApiThreads, EnginesLiveBesideEachOther) {
  osp_engine_t alone = make(configuration());
  for (uint64_t key = 1; key < 4; ++key) step(alone, key);
  const std::vector<float> expected = read_all(alone);
  OSP_OK(osp_engine_destroy(alone));
  std::vector<std::vector<float>> results(3);
  {
    std::vector<std::jthread> threads;
    for (auto& result : results) {
      threads.emplace_back([&] {
        osp_engine_t engine = make(configuration());
        for (uint64_t key = 1; key < 4; ++key) step(engine, key);
        result = read_all(engine);
        EXPECT_EQ(osp_engine_destroy(engine), OSP_SUCCESS);
      });
    }
  }
  for (const auto& result : results) EXPECT_EQ(result, expected);
}

TEST_F(CApiThreads, MessagesBelongToTheThread) {
  osp_engine_t engine = nullptr;
  OSP_EXPECT(OSP_ERROR_INVALID_CONFIG, osp_engine_create("nonsense: 1", nullptr, &engine));
  const std::string own = osp_last_error();
  std::jthread([] {
    EXPECT_STREQ(osp_last_error(), "");
    EXPECT_EQ(osp_flush(nullptr), OSP_ERROR_INVALID_HANDLE);
  }).join();
  EXPECT_EQ(own, osp_last_error());
}

/// Forward layer by layer in one thread, gradients of different layers from several, while others
/// look on.
TEST_F(CApiThreads, OneEngineIsForEveryThread) {
  const std::string text = configuration("gradient_accumulation_steps: 2\n");
  osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
  options.held_layers = 2;
  options.activation_host_bytes = 1 << 20;
  osp_engine_t engine = make(text, options), alone = make(text);
  std::atomic<bool> stop = false;
  {
    std::jthread watcher([&] {
      while (!stop) {
        osp_statistics_t statistics = OSP_STATISTICS_INIT;
        EXPECT_EQ(osp_get_statistics(engine, &statistics), OSP_SUCCESS);
        EXPECT_EQ(osp_prefetch(engine, 1), OSP_SUCCESS);
        float value = 3;
        osp_activation_t saved = 0;
        EXPECT_EQ(osp_activation_save(engine, &value, 4, nullptr, &saved), OSP_SUCCESS);
        EXPECT_EQ(osp_activation_restore(engine, saved, &value, 4, nullptr), OSP_SUCCESS);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
    for (uint64_t key = 1; key < 6; ++key) {
      {
        std::vector<std::jthread> threads;
        for (uint32_t layer = 0; layer < 3; ++layer) {
          threads.emplace_back([&, layer] {
            // Layer 0's tensor is also layer 2's: their order is that of the calls.
            if (layer == 0) return;
            use(engine, layer);
            submit(engine, layer, key);
            submit(engine, layer, key + 50);
          });
        }
      }
      use(engine, 0);
      submit(engine, 0, key);
      submit(engine, 0, key + 50);
      for (const uint32_t layer : {1u, 2u, 0u}) {
        submit(alone, layer, key);
        submit(alone, layer, key + 50);
      }
      osp_step_options_t rates = OSP_STEP_OPTIONS_INIT;
      rates.learning_rate = 1e-2;
      for (const osp_engine_t each : {engine, alone}) {
        EXPECT_EQ(osp_step(each, &rates), OSP_SUCCESS);
      }
    }
    stop = true;
  }
  EXPECT_EQ(read_all(engine), read_all(alone));
  OSP_OK(osp_engine_destroy(engine));
  OSP_OK(osp_engine_destroy(alone));
}

TEST_F(CApiThreads, WeightsAreSetWhileOthersUseLayers) {
  osp_engine_t engine = make(configuration("gradient_accumulation_steps: 1000\n"));
  std::atomic<bool> stop = false;
  {
    std::vector<std::jthread> others;
    for (const uint32_t layer : {0u, 1u, 2u}) {
      others.emplace_back([&, layer] {
        const std::vector<float> values = gradient(layer, small_layers()[layer][0].count());
        while (!stop) {
          if (layer == 0 && osp_acquire(engine, layer, nullptr, nullptr, 0) == OSP_SUCCESS) {
            EXPECT_EQ(osp_release(engine, layer, nullptr), OSP_SUCCESS);
          }
          const osp_status_t status = osp_submit_gradient(engine, layer, 0, values.data(),
                                                          OSP_FLOAT32, values.size(), nullptr);
          EXPECT_TRUE(status == OSP_SUCCESS || status == OSP_ERROR_GRADIENT_COMPLETE);
        }
      });
    }
    for (int i = 0; i < 400; ++i) {
      const osp_status_t status = osp_initialize_weights(engine, 1, 0.1);
      EXPECT_TRUE(status == OSP_SUCCESS || status == OSP_ERROR_LAYERS_HELD);
    }
    stop = true;
  }
  OSP_OK(osp_initialize_weights(engine, 7, 0.1));
  osp_engine_t fresh = make(configuration());
  EXPECT_EQ(read_all(engine), read_all(fresh));
  OSP_OK(osp_engine_destroy(engine));
  OSP_OK(osp_engine_destroy(fresh));
}

TEST_F(CApiThreads, DestroyingWaitsForNobodyAndBreaksNobody) {
  osp_engine_t engine = make(configuration());
  std::jthread other([&] {
    osp_status_t status = OSP_SUCCESS;
    while (status == OSP_SUCCESS) {
      status = osp_acquire(engine, 1, nullptr, nullptr, 0);
      if (status == OSP_SUCCESS) status = osp_release(engine, 1, nullptr);
    }
    EXPECT_EQ(status, OSP_ERROR_INVALID_HANDLE);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(osp_engine_destroy(engine), OSP_SUCCESS);
}

}  // namespace
}  // namespace overspill
