// What the machine has: CPUs, caches, NUMA nodes, drives, GPUs, limits. Read once through hwloc
// and /sys; HWLOC_XMLFILE describes another host. Pure queries.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace overspill {

struct NumaNode {
  uint32_t index;
  uint64_t memory_bytes;
  std::string cpus;  ///< "0-15,32-47"
};

/// One physical core.
struct Core {
  uint32_t numa_node;          ///< index of its nearest NumaNode
  uint32_t l3_domain;          ///< cores of a node with equal numbers share a cache
  std::vector<uint32_t> cpus;  ///< its hardware threads, by the system's numbers
};

struct Drive {
  std::string name;  ///< "nvme0n1"
  std::string model;
  uint64_t size_bytes;  ///< 0 when unknown
  int numa_node;        ///< -1 when unknown or spanning all
  bool rotational;
};

struct Gpu {
  std::string name;  ///< vendor and model as PCI ids name them
  std::string pci;   ///< "0000:01:00.0"
  int numa_node;
};

struct Machine {
  std::string cpu_model;
  uint32_t cores = 0;
  uint32_t hardware_threads = 0;
  uint64_t l2_bytes = 0;  ///< of one core
  uint64_t l3_bytes = 0;  ///< of one L3 domain
  uint32_t l3_domains = 0;
  uint64_t memory_bytes = 0;
  std::vector<NumaNode> numa_nodes;
  std::vector<Core> core_list;  ///< those of a node, and of a cache, follow each other
  bool is_this_system = true;   ///< false: HWLOC_XMLFILE describes another host
  std::vector<Drive> drives;
  std::vector<Gpu> gpus;
};

/// Throws Error(io) when the topology cannot be read.
Machine read_machine();

/// The hardware threads of a NUMA node; none when it has none, or when they are another host's.
std::vector<uint32_t> cpus_of_node(const Machine& machine, uint32_t node);

/// RLIMIT_MEMLOCK in bytes (UINT64_MAX: unlimited).
uint64_t memlock_limit_bytes();

}  // namespace overspill
