// Threads and memory on chosen NUMA nodes. Binding acts on the calling thread and on threads it
// starts afterwards; where the system refuses, nothing changes and the caller is told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace overspill {

/// Keeps the calling thread on a node's CPUs until it is destroyed (by the same thread).
class NodeBinding {
 public:
  explicit NodeBinding(uint32_t node);
  ~NodeBinding();
  NodeBinding(const NodeBinding&) = delete;
  NodeBinding& operator=(const NodeBinding&) = delete;
  bool bound() const { return bound_; }

 private:
  struct Saved;
  std::unique_ptr<Saved> saved_;
  bool bound_ = false;
};

/// Moves page-aligned memory to the node; false when the system refuses.
bool place_on_node(std::byte* memory, uint64_t bytes, uint32_t node);

}  // namespace overspill
