// NCCL's groups on GPUs' collective streams, over the fake NCCL and the fake CUDA runtime: ranks
// are threads, each with a GPU of its own.
#include "engine/collective/cuda_nccl_stream.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "engine/collective/reduction.h"
#include "tests/contract/collective_fixture.h"
#include "tests/emulation/fake_runtime_access.h"

namespace overspill {
namespace {

using test::group_over;
using test::random_floats;
using namespace std::chrono_literals;

constexpr uint64_t kMemory = 1 << 20;  // beside NCCL's

/// Kernels stand in line on the stream, as those of a GPU do.
void launch(void* stream, std::function<void()> work) {
  FAKE_CUDA(fake_cuda_enqueue)
  (
      stream,
      [](void* argument) {
        const std::unique_ptr<std::function<void()>> own(
            static_cast<std::function<void()>*>(argument));
        (*own)();
      },
      new std::function<void()>(std::move(work)));
}

const CudaReductionKernels kKernels = {
    .float_to_bf16 =
        [](void* stream, const float* values, uint16_t* rounded, uint64_t count) {
          launch(stream, [=] { round_to_bf16({values, count}, rounded); });
        },
    .bf16_to_float =
        [](void* stream, const uint16_t* rounded, float* values, uint64_t count) {
          launch(stream, [=] { widen_bf16(rounded, {values, count}); });
        },
    .add =
        [](void* stream, const float* values, float* sum, uint64_t count) {
          launch(stream, [=] {
            for (uint64_t i = 0; i < count; ++i) sum[i] += values[i];
          });
        },
    .add_bf16 =
        [](void* stream, const uint16_t* values, float* sum, uint64_t count) {
          launch(stream, [=] {
            std::vector<float> wide(count);
            widen_bf16(values, wide);
            for (uint64_t i = 0; i < count; ++i) sum[i] += wide[i];
          });
        }};

/// A rank's GPU with NCCL's staging at the end of its memory.
struct Rank {
  Rank(uint32_t rank, uint32_t size, test::MemoryStore& store, bool deterministic)
      : device(make_cuda_device(kMemory + nccl_staging_bytes(size), rank)),
        stream(make_cuda_nccl_stream(*device, kKernels)),
        collective(make_nccl_collective(
            group_over(store, "world", rank, size), *stream,
            {.deterministic = deterministic,
             .staging = {device->memory() + kMemory, nccl_staging_bytes(size)}})) {}
  std::span<float> put(const std::vector<float>& values) {
    device->copy_to_device(device->memory(), reinterpret_cast<const std::byte*>(values.data()),
                           values.size() * sizeof(float));
    return {reinterpret_cast<float*>(device->memory()), values.size()};
  }
  std::vector<float> get(size_t begin, size_t count) {
    std::vector<float> values(count);
    device->copy_to_host(reinterpret_cast<std::byte*>(values.data()),
                         device->memory() + begin * sizeof(float), count * sizeof(float));
    return values;
  }
  std::unique_ptr<CudaDevice> device;
  std::unique_ptr<NcclStream> stream;
  std::unique_ptr<Collective> collective;
};

class CudaNcclStream : public testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override {
    if (!test::fake_cuda_is_built()) GTEST_SKIP() << "built without CUDA's headers";
    const FakeCudaSettings settings{.devices = 4, .seed = GetParam(), .max_delay_us = 50};
    FAKE_CUDA(fake_cuda_configure)(&settings);
    test::fake_nccl<void(FakeNcclEnqueue)>("fake_nccl_set_enqueue")(FAKE_CUDA(fake_cuda_enqueue));
  }
  void TearDown() override {
    if (!test::fake_cuda_is_built()) return;
    EXPECT_EQ(test::take_fake_cuda_misuses(), "");
    EXPECT_EQ(FAKE_CUDA(fake_cuda_live)().streams, 0u);
  }
  static void run_ranks(uint32_t size, bool deterministic, const std::function<void(Rank&)>& body) {
    test::MemoryStore store;
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          Rank own(rank, size, store, deterministic);
          body(own);
        } catch (const Error& error) {
          ADD_FAILURE() << "rank " << rank << ": " << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};
INSTANTIATE_TEST_SUITE_P(Seeds, CudaNcclStream, testing::Values(1, 2, 3));

TEST_P(CudaNcclStream, CopiesBetweenAnyMemory) {
  const auto device = make_cuda_device(kMemory, 0);
  const auto stream = make_cuda_nccl_stream(*device, kKernels);
  // More than the buffer for pageable memory, and no multiple of it.
  std::vector<std::byte> pageable(200'001), back(pageable.size()), pinned(pageable.size());
  for (size_t i = 0; i < pageable.size(); ++i) pageable[i] = static_cast<std::byte>(i * 7 % 251);
  const HostRegistration registration = device->register_host(pinned);
  stream->copy(device->memory(), pageable.data(), pageable.size());
  stream->copy(device->memory() + kMemory / 2, device->memory(), pageable.size());
  stream->copy(pinned.data(), device->memory() + kMemory / 2, pageable.size());
  stream->copy(back.data(), device->memory() + kMemory / 2, pageable.size());
  while (!stream->idle()) std::this_thread::yield();
  EXPECT_EQ(back, pageable);
  EXPECT_EQ(pinned, pageable);
}

TEST_P(CudaNcclStream, SumsOfDoublesInOrdinaryMemoryAreTheSameEverywhere) {
  run_ranks(3, true, [](Rank& own) {
    std::vector<double> values(1000);
    std::iota(values.begin(), values.end(), own.collective->rank() * 0.1);
    own.collective->all_reduce(values);
    for (size_t i = 0; i < values.size(); ++i) {
      const double base = static_cast<double>(i);
      EXPECT_EQ(values[i], (base + (base + 0.1)) + (base + 0.2)) << i;
    }
  });
}

TEST_P(CudaNcclStream, ReducesInTheOrderOfRanks) {
  for (const ReduceType type : {ReduceType::float32, ReduceType::bf16}) {
    constexpr uint32_t kRanks = 3;
    constexpr size_t kCount = 3 * 5000;
    std::vector<std::vector<float>> values;
    std::vector<float> expected(kCount);
    for (uint32_t r = 0; r < kRanks; ++r) values.push_back(random_floats(kCount, GetParam() + r));
    for (size_t i = 0; i < kCount; ++i) {
      for (uint32_t r = 0; r < kRanks; ++r) {
        float term = values[r][i];
        if (type == ReduceType::bf16) {
          uint16_t rounded = 0;
          round_to_bf16({&term, 1}, &rounded);
          widen_bf16(&rounded, {&term, 1});
        }
        expected[i] = r == 0 ? term : expected[i] + term;
      }
    }
    run_ranks(kRanks, true, [&](Rank& own) {
      const uint32_t rank = own.collective->rank();
      own.collective->reduce_scatter(own.put(values[rank]), type);
      const size_t part = kCount / kRanks, begin = rank * part;
      const std::vector<float> sums = own.get(begin, part);
      EXPECT_EQ(std::memcmp(sums.data(), expected.data() + begin, part * sizeof(float)), 0);
    });
  }
}

TEST_P(CudaNcclStream, GathersAndBroadcasts) {
  run_ranks(4, false, [](Rank& own) {
    const uint32_t rank = own.collective->rank();
    const std::span<float> values = own.put(std::vector<float>(4 * 100, float(rank + 1)));
    own.collective->all_gather(std::as_bytes(values.subspan(rank * 100, 100)),
                               std::as_writable_bytes(values));
    EXPECT_EQ(own.get(0, 1)[0], 1.0f);
    EXPECT_EQ(own.get(399, 1)[0], 4.0f);
    own.collective->broadcast(std::as_writable_bytes(values.subspan(300)), 3);
    own.collective->barrier();
  });
}

}  // namespace
}  // namespace overspill
