// Calls in every order that a program may make, right or wrong. Each is done or refused, and the
// pager's verifier finds nothing wrong with what it does for them.
#include <fmt/format.h>

#include <cmath>
#include <random>

#include "tests/unit/bindings/c/small_engine.h"

namespace overspill {
namespace {

using namespace test;

class CApiRandom : public SmallEngineTest {
 protected:
  struct Setting {
    bool discrete, in_backward, layer_major;
    uint32_t accumulation, held, depth, gradients;
  };

  std::string text_of(const Setting& s) const {
    constexpr const char* kTiers[] = {"device", "host", "nvme"};
    const std::string device = s.discrete ? "  device: discrete\n" : "";
    const std::string update = s.in_backward ? "  update: in_backward\n" : "";
    return configuration(
        fmt::format(
            "gradient_accumulation_steps: {}\nmax_grad_norm: 0\nmax_non_finite_steps: 1000\n",
            s.accumulation),
        fmt::format("{}{}  prefetch_depth: {}\n{}", device, update, s.depth,
                    s.in_backward ? "" : fmt::format("  gradients: {}\n", kTiers[s.gradients])));
  }

  /// Errors of use are refused and change nothing; there must be no others.
  static void expect_fine(osp_status_t status) {
    const bool refused = status >= OSP_ERROR_INVALID_ARGUMENT && status <= OSP_ERROR_NO_WEIGHTS;
    EXPECT_TRUE(status == OSP_SUCCESS || refused)
        << osp_status_string(status) << ": " << osp_last_error();
  }

  void play(uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
    const Setting s{below(2) == 0, below(3) == 0, below(3) == 0, 1 + below(3),
                    1 + below(3),  below(4),      below(3)};
    osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
    options.held_layers = s.held;
    if (s.layer_major) options.loop = OSP_LOOP_LAYER_MAJOR;
    const osp_engine_t engine = make(text_of(s), options);
    osp_step_options_t rates = OSP_STEP_OPTIONS_INIT;
    rates.learning_rate = 1e-2;
    rates.allow_missing = 1;
    for (int step = 0; step < 8 && !HasFailure(); ++step) {
      if (s.in_backward) expect_fine(osp_step_begin(engine, &rates));
      for (int call = 0; call < 30 && !HasFailure(); ++call) {
        const uint32_t layer = below(3);
        switch (below(6)) {
          case 0: expect_fine(osp_acquire(engine, layer, nullptr, nullptr, 0)); break;
          case 1: expect_fine(osp_release(engine, layer, nullptr)); break;
          case 2: expect_fine(osp_prefetch(engine, layer)); break;
          case 3:
            if (below(4) == 0) expect_fine(osp_gradients_done(engine, layer));
            break;
          default: {
            const auto& tensors = small_layers()[layer];
            const uint32_t t = below(static_cast<uint32_t>(tensors.size()));
            std::vector<float> values = gradient(seed * 1000 + call, tensors[t].count());
            if (below(100) == 0 && !s.in_backward) values[0] = NAN;
            expect_fine(osp_submit_gradient(engine, layer, t, values.data(), OSP_FLOAT32,
                                            values.size(), nullptr));
          }
        }
      }
      expect_fine(osp_step(engine, s.in_backward ? nullptr : &rates));
      if (below(4) == 0) {
        for (uint32_t layer = 0; layer < 3; ++layer) osp_release(engine, layer, nullptr);
        expect_fine(osp_flush(engine));
      }
    }
    osp_engine_destroy(engine);
  }
};

TEST_F(CApiRandom, AnyCalls) {
  for (uint64_t seed = 0; seed < 100 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    play(seed);
  }
}

}  // namespace
}  // namespace overspill
