// Which CPUs do what: per NUMA node of a rank's share of the machine, those that compute and those
// whose threads wait for drives. A pure function of the machine's description.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/base/parallel.h"
#include "offload/topology.h"

namespace overspill {

struct CpuPlanOptions {
  std::vector<uint32_t> allowed{};  ///< CPUs that the machine's ranks may use; empty: all
  uint32_t local_rank = 0;          ///< among the ranks on this machine
  uint32_t local_ranks = 1;
};

/// Cores of a NUMA node, with only those of their CPUs that may be used.
struct NodeCores {
  uint32_t numa_node;
  std::vector<Core> cores;
};

struct NodeCpus {
  uint32_t numa_node;
  std::vector<uint32_t> compute;  ///< one per core; never empty
  std::vector<uint32_t> io;       ///< all of the reserved core; empty: none is reserved
  std::vector<uint32_t> idle;     ///< siblings of the compute CPUs
};

struct CpuPlan {
  std::vector<NodeCpus> nodes;
  /// False when the rank has a whole machine of one node and nothing is reserved on it: then the
  /// system's scheduler does as well without being told.
  bool pinned = false;

  std::vector<uint32_t> compute_cpus() const;
  /// The reserved CPUs; without any, all of the share: I/O threads then float over it.
  std::vector<uint32_t> io_cpus() const;
  /// The rank's share.
  std::vector<uint32_t> all_cpus() const;
};

/// Divides the machine fairly among its ranks. Up to one rank a node, a rank has whole nodes that
/// follow each other; more ranks divide the cores of each node, between L3 domains where that is
/// even. A node's share of at least 8 cores keeps its first core for I/O.
/// Throws Error(invalid_config) when there are fewer cores than ranks.
CpuPlan plan_cpus(const Machine& machine, const CpuPlanOptions& options);

/// Divides the machine among ranks of which each has a home node (that of its GPU, say), in the
/// order of the homes: a node's cores among the ranks at home on it, the cores of nodes that are
/// nobody's home among the ranks whose homes are nearest to them. A rank's home comes first in its
/// plan. Throws Error(invalid_config) when a home has fewer cores than ranks.
std::vector<CpuPlan> plan_cpus_at_homes(const Machine& machine,
                                        const std::vector<uint32_t>& allowed,
                                        std::span<const uint32_t> homes);

/// The cores that may be used, by node; `allowed` as in CpuPlanOptions.
std::vector<NodeCores> usable_cores(const Machine& machine, const std::vector<uint32_t>& allowed);

/// The plan's groups of compute threads, one per node. Of a plan without nodes: one group of all.
std::vector<ParallelGroup> parallel_groups_of(const CpuPlan& plan);

/// "0-15,32-47"
std::string cpu_list(std::vector<uint32_t> cpus);

}  // namespace overspill
