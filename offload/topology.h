// What the machine has: CPUs, caches, NUMA nodes, drives, GPUs, limits. Read once through hwloc
// and /sys, or from an XML file of hwloc, which describes another host. Pure queries.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace overspill {

struct NumaNode {
  uint32_t index;
  uint64_t memory_bytes;
  std::string cpus;  ///< "0-15,32-47"
  /// To each of Machine::numa_nodes, as the firmware rates them, 10 being the node itself; empty:
  /// unknown.
  std::vector<uint32_t> distances = {};

  bool operator==(const NumaNode&) const = default;
};

/// One physical core.
struct Core {
  uint32_t numa_node;          ///< index of its nearest NumaNode
  uint32_t l3_domain;          ///< cores of a node with equal numbers share a cache
  std::vector<uint32_t> cpus;  ///< its hardware threads, by the system's numbers
  uint32_t package = 0;        ///< its socket

  bool operator==(const Core&) const = default;
};

struct Drive {
  std::string name;  ///< "nvme0n1"
  std::string model;
  uint64_t size_bytes;  ///< 0 when unknown
  int numa_node;        ///< -1 when unknown or spanning all
  bool rotational;

  bool operator==(const Drive&) const = default;
};

struct Gpu {
  std::string name;  ///< vendor and model as PCI ids name them
  std::string pci;   ///< "0000:01:00.0"
  int numa_node;     ///< -1 when unknown or spanning all

  bool operator==(const Gpu&) const = default;
};

struct Machine {
  std::string cpu_model;
  uint32_t packages = 1;
  uint32_t cores = 0;
  uint32_t hardware_threads = 0;
  uint64_t l2_bytes = 0;  ///< of one core
  uint64_t l3_bytes = 0;  ///< of one L3 domain
  uint32_t l3_domains = 0;
  uint64_t memory_bytes = 0;
  std::vector<NumaNode> numa_nodes;
  std::vector<Core> core_list;  ///< those of a node, and of a cache, follow each other
  bool is_this_system = true;   ///< false: an XML file describes another host
  std::vector<Drive> drives;
  std::vector<Gpu> gpus;

  bool operator==(const Machine&) const = default;
};

/// The machine of an XML file of hwloc (version 1 or 2); without a path that of HWLOC_XMLFILE where
/// it is set, else this machine.
/// Throws Error(not_found) without the file, Error(invalid_file) when it is no topology or one of
/// another version, Error(io) when this machine cannot be read.
Machine read_machine(const std::filesystem::path& xml = {});

/// Saves a machine, chosen as read_machine does, as an XML file of hwloc 2. Reading it gives the
/// same Machine, except that it is not this system. Throws as read_machine, and Error(io).
void save_topology(const std::filesystem::path& to, const std::filesystem::path& from = {});

/// The firmware's distance between two nodes, 10 within one; where unknown, 20 between two.
uint32_t node_distance(const Machine& machine, uint32_t from, uint32_t to);

/// The hardware threads of a NUMA node; none when it has none, or when they are another host's.
std::vector<uint32_t> cpus_of_node(const Machine& machine, uint32_t node);

/// What this process's container may use, cgroup version 2 or 1; UINT64_MAX without a limit.
uint64_t container_memory_bytes();

/// RLIMIT_MEMLOCK in bytes (UINT64_MAX: unlimited).
uint64_t memlock_limit_bytes();

}  // namespace overspill
