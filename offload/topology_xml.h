// hwloc's description of a machine: of this one, or from and to hwloc's XML files. Internal to
// offload/topology.cpp; reads and writes the named file only.
#pragma once

#include <filesystem>
#include <memory>

struct hwloc_topology;

namespace overspill {

struct TopologyDeleter {
  void operator()(hwloc_topology* topology) const;
};
using Topology = std::unique_ptr<hwloc_topology, TopologyDeleter>;

/// Loads the file's topology, with its I/O devices. Without a path: HWLOC_XMLFILE's where that is
/// set, else this machine's.
/// Throws Error(not_found) without the file, Error(invalid_file) when it is no topology or one of
/// another version, Error(io) when this machine cannot be read.
Topology load_topology(const std::filesystem::path& xml);

/// Writes hwloc's XML, version 2. Throws Error(io).
void export_topology(const Topology& topology, const std::filesystem::path& xml);

}  // namespace overspill
