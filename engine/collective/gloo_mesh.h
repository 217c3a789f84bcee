// Connections between every two ranks of a group, over Gloo's TCP transport. Transfers go straight
// between the memory of the ranks. One thread at a time transfers; abort() comes from any thread.
// The first failure of a connection ends all of them, so that every rank learns of it at once:
// Gloo alone would let transfers that are half done wait for their timeout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/collective/gloo_collective.h"

namespace overspill {

class GlooMesh {
 public:
  /// Connects. Throws Error(rank_lost).
  GlooMesh(const CollectiveGroup& group, std::shared_ptr<GlooDevice> device);
  /// Waits for the others to be done with the group too, a short while.
  ~GlooMesh();
  GlooMesh(const GlooMesh&) = delete;
  GlooMesh& operator=(const GlooMesh&) = delete;

  /// Throws Error(rank_lost) after a failure or an abort.
  void check() const;
  /// Only this rank's calls end; the connections stay until the destructor.
  void abort(const std::string& reason);

  /// Memory in transfer with one other rank. Transfers of an equal slot and length match in the
  /// order they are posted; others never match, and end in a timeout. The destructor ends what is
  /// still under way: the memory is not touched any more.
  class PeerBuffer {
   public:
    PeerBuffer(GlooMesh& mesh, uint32_t peer, void* memory, size_t bytes);
    ~PeerBuffer();
    PeerBuffer(PeerBuffer&&) noexcept;
    void send(uint64_t slot, size_t offset, size_t bytes);
    void receive(uint64_t slot, size_t offset, size_t bytes);
    /// Each waits for one transfer, in the order they were posted.
    void wait_sent();
    void wait_received();

   private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace overspill
