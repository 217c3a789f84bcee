// The GPU's updates give the host's bits: weights, remainders and moments over several steps.
#include "optim/cuda_update.h"
#include "tests/emulation/kernel_fixture.h"

namespace overspill {
namespace {

using namespace test;

class UpdateKernels : public KernelTest {};
INSTANTIATE_SEEDS(UpdateKernels);

constexpr uint64_t kParameters = 4096;
// A frozen gap, tails that are no multiple of a pack, both groups, with and without decay.
const std::vector<UpdateRun> kRuns = {{.begin = 0, .end = 1001, .decay = true, .group = 0},
                                      {.begin = 1280, .end = 1281, .decay = false, .group = 1},
                                      {.begin = 1536, .end = 4096, .decay = true, .group = 1}};

struct State {
  Array<std::byte> weight, state;
  bool operator==(const State& other) const {
    return std::memcmp(weight.data(), other.weight.data(), weight.size()) == 0 &&
           std::memcmp(state.data(), other.state.data(), state.size()) == 0;
  }
};

void check(const OptimizerSettings& settings) {
  const bool split = settings.master == MasterFormat::split;
  const uint64_t width = split ? 2 : 4;
  const StateLayout layout = state_layout(settings, kParameters, 0);
  const State device{Array<std::byte>(kParameters * width), Array<std::byte>(layout.bytes)};
  const State host{Array<std::byte>(kParameters * width), Array<std::byte>(layout.bytes)};
  for (uint64_t i = 0; i < kParameters; ++i) {
    // Sizes over many powers of two; a float32's upper half is a bf16.
    const float value =
        random_normal(1, i) * std::exp2(static_cast<float>(random_below(2, i, 60)) - 50);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if (split) bits >>= 16;
    std::memcpy(device.weight.data() + i * width, &bits, width);
    const auto remainder = static_cast<uint16_t>(random_bits(3, i));
    if (split) std::memcpy(device.state.data() + layout.remainder + 2 * i, &remainder, 2);
  }
  std::memcpy(host.weight.data(), device.weight.data(), host.weight.size());
  std::memcpy(host.state.data(), device.state.data(), host.state.size());
  const double rates[] = {1e-3, 3e-4};
  for (uint64_t t = 1; t <= 4; ++t) {
    Array<std::byte> gradient(kParameters * width);
    for (uint64_t i = 0; i < kParameters; ++i) {
      const float value = i % 97 == 0
                              ? 0.0f
                              : random_normal(10 + t, i) *
                                    std::exp2(static_cast<float>(random_below(4, i, 40)) - 30);
      const bf16 narrow = __float2bfloat16_rn(value);
      std::memcpy(gradient.data() + i * width, split ? static_cast<const void*>(&narrow) : &value,
                  width);
    }
    const UpdateStep step = update_step(settings, rates, t, 0.7);
    UpdateChunk chunk{.weight = device.weight.data(),
                      .state = device.state.data(),
                      .gradient = gradient.data(),
                      .parameters = kParameters,
                      .exact = 0,
                      .layer = 0,
                      .first = 0};
    cuda::update_chunk(nullptr, settings, step, chunk, kRuns, t == 1);
    chunk.weight = host.weight.data();
    chunk.state = host.state.data();
    update_chunk(settings, step, chunk, kRuns, t == 1);
    ASSERT_TRUE(device == host) << "step " << t;
  }
}

TEST_P(UpdateKernels, HaveTheHostsBits) {
  for (const MasterFormat master : {MasterFormat::split, MasterFormat::float32}) {
    for (const OptimizerKind kind :
         {OptimizerKind::adamw, OptimizerKind::lion, OptimizerKind::sgd}) {
      SCOPED_TRACE(testing::Message() << "kind " << int(kind) << ", master " << int(master));
      check({.kind = kind, .master = master, .weight_decay = 0.1});
    }
    check({.kind = OptimizerKind::sgd, .master = master, .momentum = 0, .weight_decay = 0.1});
  }
}

TEST(UpdateKernels, RefuseOtherStates) {
  EXPECT_FALSE(cuda::updates_on_device({.state = StateFormat::int8}));
  EXPECT_FALSE(cuda::updates_on_device({.kind = OptimizerKind::adafactor}));
  EXPECT_TRUE(cuda::updates_on_device({}));
}

}  // namespace
}  // namespace overspill
