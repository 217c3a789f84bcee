// Prints the machine package by package, then the plan rank by rank; both as one JSON object on
// request. Changes nothing but the file named by --save.
#include "bindings/cli/topology_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "bindings/cli/machine_json.h"
#include "engine/base/error.h"
#include "engine/base/units.h"
#include "offload/drive_locality.h"
#include "offload/rank_placement.h"

namespace overspill {
namespace {

constexpr const char* kExamples =
    "\nExamples:\n"
    "  overspill topology\n"
    "  overspill topology --ranks 4 --path /mnt/nvme0 --path /mnt/nvme1\n"
    "  overspill topology --save host.xml                # on the host to plan for\n"
    "  overspill topology --load host.xml --ranks 8      # anywhere\n";

// ---- the tree ----

std::string or_unknown(const std::string& text) { return text.empty() ? "model unknown" : text; }

std::string drive_text(const Drive& drive) {
  return fmt::format("drive {}: {}, {}{}", drive.name, or_unknown(drive.model),
                     drive.size_bytes == 0 ? "size unknown" : format_bytes(drive.size_bytes),
                     drive.rotational ? ", rotational" : "");
}

void print_devices(const Machine& machine, int node, const char* indent) {
  for (const Gpu& gpu : machine.gpus) {
    if (gpu.numa_node == node) fmt::print("{}gpu {}: {}\n", indent, gpu.pci, gpu.name);
  }
  for (const Drive& drive : machine.drives) {
    if (drive.numa_node == node) fmt::print("{}{}\n", indent, drive_text(drive));
  }
}

/// Cores by package, node and L3 domain, in the machine's order within each.
using Domains = std::map<uint32_t, std::vector<Core>>;
using Packages = std::map<uint32_t, std::map<uint32_t, Domains>>;

Packages packages_of(const Machine& machine) {
  Packages packages;
  for (const Core& core : machine.core_list) {
    packages[core.package][core.numa_node][core.l3_domain].push_back(core);
  }
  return packages;
}

void print_domains(const Machine& machine, const Domains& domains) {
  for (const auto& [domain, cores] : domains) {
    std::vector<uint32_t> cpus;
    for (const Core& core : cores) cpus.insert(cpus.end(), core.cpus.begin(), core.cpus.end());
    const std::string name = machine.l3_domains == 0 ? "" : fmt::format("L3 domain {}: ", domain);
    const std::string cache =
        machine.l3_bytes == 0 ? "" : fmt::format("{}, ", format_bytes(machine.l3_bytes));
    fmt::print("    {}{}{} cores, cpus {}\n", name, cache, cores.size(), cpu_list(cpus));
  }
}

uint64_t memory_of(const Machine& machine, uint32_t node) {
  const auto found = std::ranges::find(machine.numa_nodes, node, &NumaNode::index);
  return found == machine.numa_nodes.end() ? 0 : found->memory_bytes;
}

void print_tree(const Machine& machine) {
  std::set<uint32_t> printed;
  for (const auto& [package, nodes] : packages_of(machine)) {
    fmt::print("package {}\n", package);
    for (const auto& [node, domains] : nodes) {
      fmt::print("  NUMA node {}: {}\n", node, format_bytes(memory_of(machine, node)));
      print_domains(machine, domains);
      if (printed.insert(node).second) print_devices(machine, static_cast<int>(node), "    ");
    }
  }
  for (const NumaNode& node : machine.numa_nodes) {
    if (printed.contains(node.index)) continue;
    fmt::print("NUMA node {}: {}, no cores\n", node.index, format_bytes(node.memory_bytes));
    print_devices(machine, static_cast<int>(node.index), "  ");
  }
  print_devices(machine, -1, "of unknown NUMA node, ");
}

void print_distances(const Machine& machine) {
  if (machine.numa_nodes.size() < 2) return;
  fmt::print("distances between NUMA nodes (10: the node itself)\n     ");
  for (const NumaNode& node : machine.numa_nodes) fmt::print("{:>5}", node.index);
  for (const NumaNode& from : machine.numa_nodes) {
    fmt::print("\n{:>5}", from.index);
    for (const NumaNode& to : machine.numa_nodes) {
      if (from.distances.empty()) {
        fmt::print("{:>5}", "?");
      } else {
        fmt::print("{:>5}", node_distance(machine, from.index, to.index));
      }
    }
  }
  fmt::print("\n");
}

void print_machine(const Machine& machine) {
  fmt::print("{}: {} packages, {} NUMA nodes, {} cores, {} threads, {}\n",
             machine.cpu_model.empty() ? "machine" : machine.cpu_model, machine.packages,
             machine.numa_nodes.size(), machine.cores, machine.hardware_threads,
             format_bytes(machine.memory_bytes));
  print_tree(machine);
  print_distances(machine);
}

// ---- the placement report ----

void print_cores(const PlacedCores& cores) {
  const NodeCpus& cpus = cores.cpus;
  fmt::print("  NUMA node {}: {}\n", cpus.numa_node, cores.reason);
  fmt::print("    compute  cpus {}: one thread per core\n", cpu_list(cpus.compute));
  if (cpus.io.empty()) {
    fmt::print("    i/o      floats over the share: too few cores to keep one\n");
  } else {
    fmt::print("    i/o      cpus {}: the share's first core, for threads that wait for drives\n",
               cpu_list(cpus.io));
  }
  if (!cpus.idle.empty()) {
    fmt::print("    idle     cpus {}: siblings of the compute cpus\n", cpu_list(cpus.idle));
  }
}

void print_rank(const Machine& machine, const PlacedRank& rank) {
  for (const PlacedCores& cores : rank.cores) print_cores(cores);
  for (const PlacedMemory& memory : rank.memory) {
    fmt::print("  memory of node {}, {}: {}\n", memory.numa_node, format_bytes(memory.bytes),
               memory.reason);
  }
  if (rank.gpu) {
    const auto gpu = std::ranges::find(machine.gpus, rank.gpu->name, &Gpu::pci);
    fmt::print("  GPU {}: {} ({})\n", rank.gpu->name, rank.gpu->reason, gpu->name);
  } else {
    fmt::print("  no GPU: the machine has none\n");
  }
  for (const PlacedDevice& drive : rank.drives) {
    fmt::print("  drive {}: {}\n", drive.name, drive.reason);
  }
  if (rank.drives.empty()) fmt::print("  no drive: the machine has none\n");
}

void print_placement(const Machine& machine, const RankPlacement& placement) {
  for (size_t rank = 0; rank < placement.ranks.size(); ++rank) {
    fmt::print("\nrank {} of {}\n", rank, placement.ranks.size());
    print_rank(machine, placement.ranks[rank]);
  }
  for (const std::string& warning : placement.warnings) fmt::print("\nwarning: {}\n", warning);
}

// ---- JSON ----

using Json = nlohmann::ordered_json;

Json device_json(const PlacedDevice& device) {
  return {{"name", device.name}, {"reason", device.reason}};
}

Json rank_json(const PlacedRank& rank) {
  Json cores = Json::array(), memory = Json::array(), drives = Json::array();
  for (const PlacedCores& part : rank.cores) {
    cores.push_back({{"numa_node", part.cpus.numa_node},
                     {"compute_cpus", cpu_list(part.cpus.compute)},
                     {"io_cpus", cpu_list(part.cpus.io)},
                     {"idle_cpus", cpu_list(part.cpus.idle)},
                     {"reason", part.reason}});
  }
  for (const PlacedMemory& part : rank.memory) {
    memory.push_back(
        {{"numa_node", part.numa_node}, {"bytes", part.bytes}, {"reason", part.reason}});
  }
  for (const PlacedDevice& drive : rank.drives) drives.push_back(device_json(drive));
  return {{"cores", cores},
          {"memory", memory},
          {"gpu", rank.gpu ? device_json(*rank.gpu) : Json()},
          {"drives", drives}};
}

Json topology_json(const Machine& machine, const std::optional<RankPlacement>& placement) {
  Json json = {{"machine", machine_json(machine)}};
  if (!placement) return json;
  json["ranks"] = Json::array();
  for (const PlacedRank& rank : placement->ranks) json["ranks"].push_back(rank_json(rank));
  json["warnings"] = placement->warnings;
  return json;
}

// ---- options ----

std::vector<std::string> drives_of(const TopologyArguments& arguments, const Machine& machine) {
  std::vector<std::string> drives;
  for (const std::filesystem::path& path : arguments.paths) {
    if (!machine.is_this_system) {
      fail(ErrorCode::invalid_config,
           "--path {}: directories of this machine say nothing of the loaded one; leave --path out",
           path.string());
    }
    if (!std::filesystem::exists(path)) {
      fail(ErrorCode::not_found, "--path {}: does not exist; name a directory on a drive",
           path.string());
    }
    drives.push_back(drive_of(path));
    if (drives.back().empty()) {
      fail(ErrorCode::invalid_config,
           "--path {}: this is on no single drive (tmpfs, network, RAID); name a directory on one",
           path.string());
    }
  }
  return drives;
}

std::optional<RankPlacement> placement_of(const TopologyArguments& arguments,
                                          const Machine& machine) {
  if (arguments.ranks == 0) return std::nullopt;
  PlacementOptions options{.ranks = arguments.ranks};
  if (machine.is_this_system) options.allowed = allowed_cpus();
  options.drives = drives_of(arguments, machine);
  return plan_ranks(machine, options);
}

}  // namespace

CLI::App* add_topology_command(CLI::App& app, TopologyArguments& arguments) {
  CLI::App* topology = app.add_subcommand(
      "topology", "Show what is near what in a machine, and where its ranks are placed");
  topology->add_option("--load", arguments.load,
                       "Show the machine of this hwloc XML file instead of this one");
  topology->add_option("--save", arguments.save, "Write the machine as an hwloc XML file");
  CLI::Option* ranks =
      topology->add_option("--ranks", arguments.ranks, "Plan for so many ranks on the machine")
          ->check(CLI::Range(1, 4096));
  topology
      ->add_option("--path", arguments.paths,
                   "Directory on a drive to use; give it once per drive (default: all NVMe drives)")
      ->allow_extra_args(true)
      ->needs(ranks);
  topology->add_flag("--json", arguments.json, "Print one JSON object");
  topology->footer(kExamples);
  return topology;
}

int run_topology(const TopologyArguments& arguments) {
  const Machine machine = read_machine(arguments.load);
  const std::optional<RankPlacement> placement = placement_of(arguments, machine);
  if (!arguments.save.empty()) save_topology(arguments.save, arguments.load);
  if (arguments.json) {
    print_json(topology_json(machine, placement));
    return 0;
  }
  print_machine(machine);
  if (placement) print_placement(machine, *placement);
  if (!arguments.save.empty()) fmt::print("\nsaved to {}\n", arguments.save.string());
  return 0;
}

}  // namespace overspill
