// Which drives are near this process: the drive behind a path, the NUMA node of the CPUs it may
// use, and the choice between paths. Pure queries of /sys and the machine's description.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "offload/topology.h"

namespace overspill {

/// The whole drive that holds a path (or the nearest existing directory above it), such as
/// "nvme0n1"; empty when no single drive does (tmpfs, network, RAID).
std::string drive_of(const std::filesystem::path& path);

/// The NUMA node that holds all of the CPUs; -1 when they lie on several.
int node_of_cpus(const Machine& machine, std::span<const uint32_t> cpus);
/// The CPUs that this process may run on.
std::vector<uint32_t> allowed_cpus();

/// Indices of the drives on the node, in order; empty when none is there.
std::vector<size_t> drives_on_node(std::span<const std::string> drives, const Machine& machine,
                                   int node);

}  // namespace overspill
