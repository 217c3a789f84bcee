// Ranks as threads of the test, over every backend of Collective; NCCL over its fake.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/error.h"
#include "engine/collective/gloo_collective.h"
#include "engine/collective/nccl_collective.h"
#include "engine/collective/reduction.h"
#include "tests/emulation/fake_nccl.h"

namespace overspill::test {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

/// The run's key-value store, in memory.
class MemoryStore {
 public:
  void set(const std::string& key, const std::string& value) {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, 20s, [&] { return values_.contains(key); })) {
      fail(ErrorCode::rank_lost, "key {} is missing", key);
    }
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

/// A stream of a GPU whose memory is the host's: a thread that does its work in order.
class HostStream final : public NcclStream {
 public:
  HostStream() : thread_([this] { work(); }) {}
  ~HostStream() override {
    put({});
    thread_.join();
  }
  void put(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void* handle() const override { return const_cast<HostStream*>(this); }
  bool idle() override {
    const std::lock_guard lock(mutex_);
    return tasks_.empty();
  }
  void copy(void* to, const void* from, size_t bytes) override {
    put([=] { std::memmove(to, from, bytes); });
  }
  void round_to_bf16(const float* values, uint16_t* rounded, size_t count) override {
    put([=] { overspill::round_to_bf16({values, count}, rounded); });
  }
  void widen_bf16(const uint16_t* rounded, float* values, size_t count) override {
    put([=] { overspill::widen_bf16(rounded, {values, count}); });
  }
  void sum_in_rank_order(ReduceType type, const void* contributions, size_t stride, uint32_t ranks,
                         float* sum, size_t count) override {
    put([=] {
      type == ReduceType::bf16 ? add<uint16_t>(contributions, stride, ranks, sum, count)
                               : add<float>(contributions, stride, ranks, sum, count);
    });
  }

 private:
  template <class T>
  static void add(const void* contributions, size_t stride, uint32_t ranks, float* sum,
                  size_t count) {
    std::vector<const T*> places;
    for (uint32_t r = 0; r < ranks; ++r) {
      places.push_back(static_cast<const T*>(contributions) + r * stride);
    }
    overspill::sum_in_rank_order(places, {sum, count});
  }
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      const std::function<void()> task = tasks_.front();
      if (!task) return;
      lock.unlock();
      task();
      lock.lock();
      tasks_.pop_front();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

/// A function that the fake NCCL adds to NCCL's. Makes the backend open the fake.
template <class F>
F* fake_nccl(const char* name) {
  setenv("OVERSPILL_NCCL_LIBRARY", OVERSPILL_FAKE_NCCL, 1);
  void* const library = dlopen(OVERSPILL_FAKE_NCCL, RTLD_NOW);
  EXPECT_NE(library, nullptr) << dlerror();
  return reinterpret_cast<F*>(dlsym(library, name));
}

enum class Backend { local, gloo, nccl, nccl_deterministic };

struct CollectiveCase {
  Backend backend;
  uint32_t size;
  bool on_nccl() const { return backend >= Backend::nccl; }
  bool in_rank_order() const { return backend != Backend::nccl; }
};

inline std::string case_name(const testing::TestParamInfo<CollectiveCase>& info) {
  static const char* const names[] = {"Local", "Gloo", "Nccl", "NcclDeterministic"};
  return names[static_cast<int>(info.param.backend)] + std::to_string(info.param.size);
}

/// What one rank owns beside its collectives: of a process in real life.
class RankResources {
 public:
  explicit RankResources(const CollectiveCase& on) : case_(on) {
    if (on.backend == Backend::gloo) device_ = open_gloo_device("127.0.0.1");
  }
  std::unique_ptr<Collective> make(const CollectiveGroup& group) {
    if (case_.backend == Backend::local) return make_local_collective();
    if (case_.backend == Backend::gloo) return make_gloo_collective(group, device_);
    streams_.push_back(std::make_unique<HostStream>());
    staging_.push_back(std::make_unique_for_overwrite<std::byte[]>(nccl_staging_bytes(group.size)));
    return make_nccl_collective(
        group, *streams_.back(),
        {.deterministic = case_.backend == Backend::nccl_deterministic,
         .staging = {staging_.back().get(), nccl_staging_bytes(group.size)}});
  }

 private:
  const CollectiveCase case_;
  std::shared_ptr<GlooDevice> device_;
  std::vector<std::unique_ptr<std::byte[]>> staging_;
  std::vector<std::unique_ptr<HostStream>> streams_;
};

inline CollectiveGroup group_over(MemoryStore& store, const std::string& name, uint32_t rank,
                                  uint32_t size, milliseconds timeout = 20s) {
  return {
      .name = name,
      .rank = rank,
      .size = size,
      .timeout = timeout,
      .set = [&store](const std::string& key, const std::string& value) { store.set(key, value); },
      .get = [&store](const std::string& key) { return store.get(key); }};
}

using MakeGroup = std::function<std::unique_ptr<Collective>(const CollectiveGroup&)>;

/// Runs the body as every rank at once; what it threw, by rank.
inline std::vector<std::string> run_ranks(
    const CollectiveCase& on,
    const std::function<void(uint32_t rank, MemoryStore& store, const MakeGroup& make)>& body) {
  if (on.on_nccl()) {
    fake_nccl<void(FakeNcclEnqueue)>("fake_nccl_set_enqueue")(
        [](void* stream, void (*task)(void*), void* argument) {
          static_cast<HostStream*>(stream)->put([=] { task(argument); });
        });
  }
  MemoryStore store;
  std::vector<std::string> errors(on.size);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < on.size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        RankResources resources(on);
        body(rank, store, [&](const CollectiveGroup& group) { return resources.make(group); });
      } catch (const Error& error) {
        errors[rank] = std::string(error_code_name(error.code())) + ": " + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// The same with one group of all ranks.
inline std::vector<std::string> run_group(const CollectiveCase& on,
                                          const std::function<void(Collective&)>& body,
                                          milliseconds timeout = 20s) {
  return run_ranks(on, [&](uint32_t rank, MemoryStore& store, const MakeGroup& make) {
    const auto collective = make(group_over(store, "world", rank, on.size, timeout));
    body(*collective);
  });
}

inline void expect_no_errors(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// Of many magnitudes, the same for a seed and rank everywhere.
inline std::vector<float> random_floats(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values(count);
  for (float& value : values) {
    const auto bits = static_cast<uint32_t>(random());
    value = std::ldexp(static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-31f,
                       static_cast<int>(random() % 9) - 4);
  }
  return values;
}

}  // namespace overspill::test
