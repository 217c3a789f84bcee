// One group's communicator, between nccl_collective.cpp (its life, waits and calls) and
// nccl_reduction.cpp (sums in rank order or in bf16). Internal to engine/collective.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>

#include "engine/collective/nccl_collective.h"
#include "engine/collective/nccl_library.h"

namespace overspill {

class NcclCollective final : public Collective {
 public:
  NcclCollective(const CollectiveGroup& group, NcclStream& stream, const NcclOptions& options);
  ~NcclCollective() override;

  void all_gather(std::span<const std::byte> part, std::span<std::byte> whole) override;
  void reduce_scatter(std::span<float> values, ReduceType type) override;
  void all_reduce(std::span<float> values, ReduceType type) override;
  void all_reduce(std::span<double> values) override;
  void broadcast(std::span<std::byte> bytes, uint32_t root) override;
  void barrier() override;
  bool on_stream() const override { return options_.deferred; }
  void await(const std::function<bool()>& done) override;
  void abort(const std::string& reason) override { set_reason(reason); }

 private:
  void set_reason(const std::string& reason);
  /// Of a call, which holds the lock to its end.
  std::unique_lock<std::mutex> begin() {
    std::unique_lock lock(call_);
    if (failed_) lose();
    return lock;
  }
  [[noreturn]] void lose();
  [[noreturn]] void lose(const std::string& what) {
    set_reason(fmt::format("group \"{}\": rank {}: {}", group_.name, group_.member(rank()), what));
    lose();
  }
  [[noreturn]] void lose(const char* function, int error) {
    lose(fmt::format("{}: {} ({}); another rank is lost or failed, see the messages of all ranks",
                     function, nccl_.error_text(error), nccl_.last_error(comm_)));
  }
  void check(const char* function, int result);
  void check_peers();
  std::string silence() const;
  void wait();
  void wait_unless_deferred() {
    if (!options_.deferred) wait();
  }
  template <class F>
  void exchange(F&& sends_and_receives);

  void reduce(std::span<float> values, ReduceType type);
  void gather_floats(std::span<float> values, const Partition& parts, ReduceType type);
  void reduce_scatter_rounded(std::span<float> values, const Partition& parts);
  void all_reduce_rounded(std::span<float> values);

  // Staging memory: a place for each rank, of float32 or of bf16; in the latter case the second
  // half is for what goes out.
  float* incoming(uint32_t index) {
    return reinterpret_cast<float*>(options_.staging.data()) + index * piece_;
  }
  uint16_t* incoming_bf16(uint32_t index) {
    return reinterpret_cast<uint16_t*>(options_.staging.data()) + index * piece_;
  }
  uint16_t* outgoing_bf16(uint32_t index) { return incoming_bf16(size() + index); }

  const CollectiveGroup group_;
  NcclStream& stream_;
  const NcclOptions options_;
  const std::chrono::milliseconds patience_;
  const uint64_t piece_;
  const NcclLibrary nccl_;
  NcclComm* comm_ = nullptr;
  std::mutex call_;  ///< the communicator's: of the thread that calls, or of the one that waits
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::string reason_;
};

}  // namespace overspill
