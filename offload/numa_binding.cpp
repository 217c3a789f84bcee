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

bool place_on_node(std::byte* memory, uint64_t bytes, uint32_t node) {
  const Topology topology;
  const hwloc_obj_t object = topology.node(node);
  if (object == nullptr) return false;
  constexpr int kFlags = HWLOC_MEMBIND_BYNODESET | HWLOC_MEMBIND_MIGRATE | HWLOC_MEMBIND_STRICT;
  return hwloc_set_area_membind(topology.get(), memory, bytes, object->nodeset, HWLOC_MEMBIND_BIND,
                                kFlags) == 0;
}

}  // namespace overspill
