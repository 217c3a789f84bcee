// What ranks do together: the narrow interface of all backends. One thread at a time calls an
// object, in the same order on every rank; the executor's collective lane is that thread, so that
// everything else goes on meanwhile.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace overspill {

/// What a rank's contribution to a sum is rounded to before it leaves. Sums are made in float32.
enum class ReduceType : uint8_t { float32, bf16 };

class Collective {
 public:
  Collective(uint32_t rank, uint32_t size) : rank_(rank), size_(size) {}
  virtual ~Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  uint32_t rank() const { return rank_; }
  uint32_t size() const { return size_; }

  // All throw Error(rank_lost) when a rank does not take part; no later call succeeds then.

  /// Every rank's `part` in rank order: `whole` has size() * part.size() bytes. `part` may lie at
  /// its own place in `whole`.
  virtual void all_gather(std::span<const std::byte> part, std::span<std::byte> whole) = 0;
  /// `values` are size() parts of equal length: this rank's becomes the sum of all ranks' over it.
  /// What the others hold afterwards is undefined.
  virtual void reduce_scatter(std::span<float> values, ReduceType type) = 0;
  /// The same bits on every rank.
  virtual void all_reduce(std::span<float> values, ReduceType type) = 0;
  /// Summed in rank order, the same bits on every rank; for few values.
  virtual void all_reduce(std::span<double> values) = 0;
  virtual void broadcast(std::span<std::byte> bytes, uint32_t root) = 0;
  virtual void barrier() = 0;

  /// Whether calls that move floats and bytes return when their work is on the device's collective
  /// stream. await(), from one other thread, waits for it: until done() is true. It throws as the
  /// calls do.
  virtual bool on_stream() const { return false; }
  virtual void await(const std::function<bool()>& done);

  /// From any thread: calls under way and later ones throw Error(rank_lost) with the reason.
  virtual void abort(const std::string& reason) = 0;

  /// Payload bytes that this rank has sent to others.
  uint64_t bytes_sent() const { return bytes_sent_; }

 protected:
  std::atomic<uint64_t> bytes_sent_{0};

 private:
  const uint32_t rank_, size_;
};

/// The ranks that a Program's collectives run over: all of them (who agree), those that share this
/// copy of the state, and those that hold the same part of other copies.
struct RankGroups {
  Collective* world = nullptr;
  Collective* shard = nullptr;
  Collective* replicas = nullptr;
};

/// Of one rank: nothing to do.
std::unique_ptr<Collective> make_local_collective();

}  // namespace overspill
