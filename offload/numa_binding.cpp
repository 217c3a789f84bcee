// Binding through hwloc. A topology from HWLOC_XMLFILE is another machine's, and hwloc then
// refuses.
#include "offload/numa_binding.h"

#include <hwloc.h>

namespace overspill {
namespace {

class Topology {
 public:
  Topology() {
    if (hwloc_topology_init(&topology_) != 0) return;
    loaded_ = hwloc_topology_load(topology_) == 0;
  }
  ~Topology() {
    if (topology_ != nullptr) hwloc_topology_destroy(topology_);
  }
  Topology(const Topology&) = delete;
  Topology& operator=(const Topology&) = delete;

  hwloc_topology_t get() const { return topology_; }
  /// Null when there is no such node.
  hwloc_obj_t node(uint32_t index) const {
    return loaded_ ? hwloc_get_numanode_obj_by_os_index(topology_, index) : nullptr;
  }

 private:
  hwloc_topology_t topology_ = nullptr;
  bool loaded_ = false;
};

}  // namespace

struct NodeBinding::Saved {
  Topology topology;
  hwloc_bitmap_t cpus = hwloc_bitmap_alloc();
  ~Saved() { hwloc_bitmap_free(cpus); }
};

NodeBinding::NodeBinding(uint32_t node) : saved_(std::make_unique<Saved>()) {
  const hwloc_topology_t topology = saved_->topology.get();
  const hwloc_obj_t object = saved_->topology.node(node);
  if (object == nullptr) return;
  if (hwloc_get_cpubind(topology, saved_->cpus, HWLOC_CPUBIND_THREAD) != 0) return;
  bound_ = hwloc_set_cpubind(topology, object->cpuset, HWLOC_CPUBIND_THREAD) == 0;
}

NodeBinding::~NodeBinding() {
  if (bound_) hwloc_set_cpubind(saved_->topology.get(), saved_->cpus, HWLOC_CPUBIND_THREAD);
}

bool place_on_node(std::byte* memory, uint64_t bytes, uint32_t node) {
  const Topology topology;
  const hwloc_obj_t object = topology.node(node);
  if (object == nullptr) return false;
  constexpr int kFlags = HWLOC_MEMBIND_BYNODESET | HWLOC_MEMBIND_MIGRATE | HWLOC_MEMBIND_STRICT;
  return hwloc_set_area_membind(topology.get(), memory, bytes, object->nodeset, HWLOC_MEMBIND_BIND,
                                kFlags) == 0;
}

}  // namespace overspill
