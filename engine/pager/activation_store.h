// Activations that a program saves in the forward and takes back in the backward: host memory
// first, and when that is full the oldest ones go to NVMe, since the newest are wanted first.
// Thread-safe: one call at a time; prefetching has a thread of its own. On a GPU, copies are put on
// the program's streams, from and to pinned memory.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "engine/pager/free_ranges.h"
#include "engine/pager/memory_uses.h"
#include "nvme/volume.h"
#include "offload/arena.h"

namespace overspill {

class ActivationStore {
 public:
  struct Options {
    uint64_t host_bytes = 0;
    uint64_t nvme_bytes = 0;
    std::vector<std::filesystem::path> nvme_paths;
    IoOptions io;
    CudaDevice* gpu = nullptr;  ///< where the program's buffers are; null: the host. Outlives it
  };
  struct Counts {
    uint64_t saved_bytes = 0, spilled_bytes = 0;
  };
  /// Allocates all of it. Throws Error.
  explicit ActivationStore(const Options& options);
  ~ActivationStore();

  /// Copies; returns the activation's number, never 0. Throws Error(does_not_fit), and MisuseError
  /// for memory that a GPU does not reach.
  uint64_t save(const std::byte* buffer, uint64_t bytes, void* stream);
  /// Begins to bring one back into host memory, as far as there is room.
  void prefetch(uint64_t activation);
  /// Copies back and forgets. Throws MisuseError for another size, or such memory.
  void restore(uint64_t activation, std::byte* buffer, uint64_t bytes, void* stream);
  void discard(uint64_t activation);
  Counts counts();

 private:
  struct Saved {
    uint64_t bytes = 0, room = 0;  ///< room: whole pages
    std::optional<uint64_t> host, nvme;
    MemoryUses copy{};  ///< into host memory, which may still be under way
  };
  /// Host memory that copies on streams still use.
  struct Leaving {
    uint64_t at, room;
    StreamPoints copies;
  };

  Saved& find(uint64_t activation);
  /// Host memory for it, for which older ones but `keep` are spilled if need be.
  std::optional<uint64_t> make_room(uint64_t room, uint64_t keep);
  bool spill(Saved& saved);
  void give_back(Saved& saved);
  void take_back(bool wait);
  /// False where there is no host memory for it.
  bool load(uint64_t activation, Saved& saved);
  void pass_through(const Saved& saved, std::byte* buffer, void* stream);
  void copy(std::byte* to, const std::byte* from, uint64_t bytes, void* stream);
  void forget(uint64_t activation);
  void prefetch_main();

  const Options options_;
  const uint64_t host_bytes_;
  Arena host_;
  PinnedMemory pinned_;
  FreeRanges host_free_, nvme_free_;
  std::optional<Volume> volume_;
  std::unique_ptr<Channel> channel_;

  std::mutex mutex_;
  std::map<uint64_t, Saved> saved_;  ///< by number: the oldest first
  std::deque<Leaving> leaving_;      ///< in order
  uint64_t last_ = 0;
  Counts counts_;
  std::deque<uint64_t> wanted_;
  std::condition_variable wake_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace overspill
