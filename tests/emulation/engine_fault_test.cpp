// What a GPU does wrong ends a run with one clear error, and leaves nothing behind.
#include <dlfcn.h>

#include "tests/contract/run_ranks.h"
#include "tests/emulation/fake_nccl.h"
#include "tests/emulation/fake_runtime.h"
#include "tests/fault/training_fixture.h"

namespace overspill {
namespace {

using namespace test;

template <class F>
F* fake(const char* library, const char* name) {
  return reinterpret_cast<F*>(dlsym(dlopen(library, RTLD_NOW), name));
}

class GpuFault : public TrainingTest {
 protected:
  void TearDown() override {
    reset();
    TrainingTest::TearDown();
  }
  static FakeCudaLive live() {
    return fake<decltype(fake_cuda_live)>(OVERSPILL_FAKE_CUDART, "fake_cuda_live")();
  }
  static void reset() {
    const FakeCudaSettings settings{.devices = 4, .max_delay_us = 20};
    fake<decltype(fake_cuda_configure)>(OVERSPILL_FAKE_CUDART, "fake_cuda_configure")(&settings);
  }
  static void expect_nothing_left() {
    const FakeCudaLive left = live();
    EXPECT_EQ(left.streams + left.events + left.allocations + left.registrations, 0u);
  }
  /// The error that the run ends with.
  static Error error_of(const TrainConfig& config) {
    try {
      run(config);
    } catch (const Error& error) {
      return error;
    }
    return Error(ErrorCode::internal, "the run came to its end");
  }
  static Error error_of(const RankResult& rank) {
    try {
      if (rank.error) std::rethrow_exception(rank.error);
    } catch (const Error& error) {
      return error;
    }
    return Error(ErrorCode::internal, "the rank came to its end");
  }
};

TEST_F(GpuFault, LostGpuIsNamed) {
  constexpr int kIllegalAddress = 700;
  const auto break_device =
      fake<decltype(fake_cuda_break_device)>(OVERSPILL_FAKE_CUDART, "fake_cuda_break_device");
  for (const int work : {5, 60, 700}) {
    for (const bool in_backward : {false, true}) {
      SCOPED_TRACE(work);
      TrainConfig config = tiny_config();
      if (in_backward) update_in_backward(config);
      fs::remove_all(config.output_dir);
      break_device(0, kIllegalAddress, work);
      const Error error = error_of(config);
      EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
      EXPECT_TRUE(has(error.what(), "cudaErrorIllegalAddress"));
      EXPECT_FALSE(fs::exists(config.output_dir / "checkpoint-3"));
      expect_nothing_left();
      reset();
    }
  }
}

TEST_F(GpuFault, FailedCallSaysWhatWasBeingDone) {
  constexpr int kNotSupported = 801;
  const auto fail_call =
      fake<decltype(fake_cuda_fail_call)>(OVERSPILL_FAKE_CUDART, "fake_cuda_fail_call");
  struct Call {
    const char *name, *doing;
    int skip = 0;
  };
  const std::vector<Call> calls = {
      {"cudaMalloc", "allocate"},
      {"cudaHostRegister", "pin"},
      {"cudaMemcpyAsync", "copy", 9},
      {"cudaEventCreateWithFlags", "create an event", 9},  // while the executor starts its lanes
      {"cudaEventRecord", "record an event"},
      {"cudaStreamWaitEvent", "event"},
      {"cudaEventSynchronize", "before an event"}};
  for (const auto& [call, doing, skip] : calls) {
    SCOPED_TRACE(call);
    fail_call(call, kNotSupported, skip);
    const Error error = error_of(tiny_config());
    EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
    EXPECT_TRUE(has(error.what(), doing));
    expect_nothing_left();
    reset();
  }
}

TEST_F(GpuFault, MemoryThatIsNotThereIsRefusedBeforeTheFirstStep) {
  FakeCudaSettings small{.devices = 1};
  small.memory_bytes = 2 * kMiB;
  fake<decltype(fake_cuda_configure)>(OVERSPILL_FAKE_CUDART, "fake_cuda_configure")(&small);
  TrainConfig config = tiny_config();
  place_all(config, Placement::device);
  config.offload.device_memory = 64 * kMiB;  // more than the GPU has
  Error error = error_of(config);
  EXPECT_EQ(error.code(), ErrorCode::does_not_fit);
  EXPECT_TRUE(has(error.what(), "lower offload.device_memory"));
  config.offload.device_memory.reset();  // what is free
  error = error_of(config);
  EXPECT_EQ(error.code(), ErrorCode::does_not_fit);
  EXPECT_TRUE(has(error.what(), "offload.device_memory of"));
  expect_nothing_left();
}

/// One allocation, one registration, and the streams: all before the first step.
TEST_F(GpuFault, NothingIsAllocatedAfterTheStart) {
  Trainer trainer(tiny_config());
  const FakeCudaLive before = live();
  EXPECT_EQ(before.allocations, 1u);
  EXPECT_EQ(before.registrations, 1u);
  const std::atomic<bool> stop{false};
  EXPECT_EQ(trainer.time_steps(2, stop).size(), 2u);
  const FakeCudaLive after = live();
  EXPECT_EQ(after.peak_device_bytes, before.peak_device_bytes);
  EXPECT_EQ(after.events, before.events);
  EXPECT_EQ(after.registrations, 1u);
}

TEST_F(GpuFault, LostRankEndsTheOthers) {
  const auto fail_rank =
      fake<decltype(fake_nccl_fail_rank)>(OVERSPILL_FAKE_NCCL, "fake_nccl_fail_rank");
  TrainConfig config = tiny_config();
  config.gradient_accumulation_steps = 1;
  config.max_steps = 500;
  const std::jthread after_a_step([&] {
    while (metrics_of(config.output_dir).empty()) std::this_thread::yield();
    fail_rank(1);
  });
  try {
    run_ranks(config, 2);
    ADD_FAILURE() << "the run came to its end";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::rank_lost) << error.what();
  }
  fail_rank(-1);
  expect_nothing_left();
}

/// Its groups' work lies on one stream, each behind the other's: every group must be given up.
TEST_F(GpuFault, ADriveOfOneRankThatFailsEndsRanksOfTwoGroups) {
  TrainConfig config = tiny_config();
  config.gradient_accumulation_steps = 1;
  config.max_steps = 100;
  config.hybrid_shard = 2;
  for (const uint64_t request : {60, 100, 150}) {
    SCOPED_TRACE(request);
    fs::remove_all(config.output_dir);
    const auto ends = end_ranks(config, 4, [&](TrainConfig own, uint32_t rank) {
      if (rank != 3) return own;
      own.offload.io.wrap = [=](std::unique_ptr<AsyncIo> io) {
        return make_faulty_io(std::move(io), {.fail_request = request});
      };
      return own;
    });
    for (uint32_t rank = 0; rank < ends.size(); ++rank) {
      SCOPED_TRACE(rank);
      const Error error = error_of(ends[rank]);
      EXPECT_EQ(error.code(), rank == 3 ? ErrorCode::io : ErrorCode::rank_lost) << error.what();
      EXPECT_TRUE(has(error.what(), "Input/output error after 3 tries"));
    }
    expect_nothing_left();
  }
}

TEST_F(GpuFault, RanksThatAreShownOneGpuAreRefused) {
  const FakeCudaSettings one{.devices = 1};
  fake<decltype(fake_cuda_configure)>(OVERSPILL_FAKE_CUDART, "fake_cuda_configure")(&one);
  setenv("CUDA_VISIBLE_DEVICES", "3", 1);  // to all ranks of this process
  const auto ends = end_ranks(tiny_config(), 2);
  unsetenv("CUDA_VISIBLE_DEVICES");
  for (const RankResult& end : ends) {
    const Error error = error_of(end);
    // Found by each, or told by the one that was first.
    EXPECT_TRUE(error.code() == ErrorCode::invalid_config || has(error.what(), "invalid_config: "));
    EXPECT_TRUE(has(error.what(), "ranks 0 and 1 of one host have the same GPU, 0000:1a:00.0"));
    EXPECT_TRUE(has(error.what(), "CUDA_VISIBLE_DEVICES"));
  }
  expect_nothing_left();
}

TEST_F(GpuFault, BackendsOfOtherDevicesAreRefused) {
  TrainConfig config = tiny_config();
  config.collective_backend = CollectiveBackend::gloo;
  EXPECT_THROW(run_ranks(config, 2), Error);
  config.offload.device = DeviceMode::unified;
  config.collective_backend = CollectiveBackend::nccl;
  EXPECT_THROW(run_ranks(config, 2), Error);
}

}  // namespace
}  // namespace overspill
