// Where each rank of a host runs and what is near it: cores, memory nodes, GPU and drives, each
// with its reason in words. A pure function of the machine's description, so it plans for any host.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "offload/cpu_plan.h"
#include "offload/topology.h"

namespace overspill {

struct PlacementOptions {
  uint32_t ranks = 1;
  std::vector<uint32_t> allowed{};  ///< CPUs that the ranks may use; empty: all
  /// Names of the drives to use; empty: the machine's NVMe drives, all drives where it has none.
  std::vector<std::string> drives{};
  /// By rank, the PCI address of the GPU that it uses. Empty, or with one that the machine's
  /// description lacks: the plan chooses.
  std::vector<std::string> gpus{};
};

/// A rank's cores on one NUMA node.
struct PlacedCores {
  NodeCpus cpus;
  std::string reason;
};

/// Memory that the rank's cores reach first.
struct PlacedMemory {
  uint32_t numa_node;
  uint64_t bytes;  ///< the rank's part of the node, by cores
  std::string reason;
};

/// A GPU or a drive.
struct PlacedDevice {
  std::string name;  ///< a GPU's PCI address, a drive's name
  std::string reason;
};

struct PlacedRank {
  std::vector<PlacedCores> cores;  ///< the GPU's node first
  std::vector<PlacedMemory> memory;
  std::optional<PlacedDevice> gpu;
  std::vector<PlacedDevice> drives;  ///< nearest first
};

struct RankPlacement {
  std::vector<PlacedRank> ranks;
  std::vector<std::string> warnings;  ///< what makes the ranks uneven or slow
};

/// Gives every rank a GPU, its own where there are enough or what options.gpus says, and the cores
/// of the GPU's node: the sum of the distances between ranks and GPUs is the least that the nodes'
/// cores allow rank by rank, and of equally near GPUs those on nodes with the most cores a rank,
/// far apart, are taken. Nodes without a GPU in use go to the ranks nearest to them. Without GPUs
/// the ranks divide the machine as plan_cpus does. A rank's drives are those on its nodes; without
/// any there, all of them. Throws Error(invalid_config) when there are fewer cores than ranks, or
/// no drive of a name.
RankPlacement plan_ranks(const Machine& machine, const PlacementOptions& options);

}  // namespace overspill
