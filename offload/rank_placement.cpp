// GPUs first, since their places are fixed; cores follow the GPUs, memory and drives the cores.
#include "offload/rank_placement.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "engine/base/error.h"

namespace overspill {
namespace {

constexpr uint32_t kLocalDistance = 10;

/// The distance of a device from the nearest of some nodes, and which that is. A device of unknown
/// place is as near as any.
struct Nearness {
  uint32_t distance = kLocalDistance;
  uint32_t node = 0;
};

Nearness nearness(const Machine& machine, int device_node, const std::vector<uint32_t>& nodes) {
  Nearness best{.distance = UINT32_MAX, .node = nodes.front()};
  for (const uint32_t node : nodes) {
    const uint32_t distance =
        device_node < 0 ? kLocalDistance
                        : node_distance(machine, node, static_cast<uint32_t>(device_node));
    if (distance < best.distance) best = {distance, node};
  }
  return best;
}

// ---- GPUs and cores ----

/// A rank before it has a number.
struct Seat {
  uint32_t home;  ///< NUMA node of its cores
  size_t gpu;     ///< index into Machine::gpus
};

/// The best next seat at one of some GPUs; see plan_ranks for the order of preference.
Seat next_seat(const Machine& machine, const std::vector<NodeCores>& nodes,
               const std::vector<size_t>& gpus, const std::vector<Seat>& taken) {
  using Cost = std::tuple<ptrdiff_t, uint32_t, double, int64_t>;
  std::optional<std::pair<Cost, Seat>> best;
  for (const size_t gpu : gpus) {
    const ptrdiff_t users = std::ranges::count(taken, gpu, &Seat::gpu);
    for (const NodeCores& node : nodes) {
      const auto ranks =
          static_cast<size_t>(std::ranges::count(taken, node.numa_node, &Seat::home));
      if (ranks >= node.cores.size()) continue;
      const double cores_a_rank =
          static_cast<double>(node.cores.size()) / static_cast<double>(ranks + 1);
      int64_t apart = INT64_MAX;
      for (const Seat& other : taken) {
        const int64_t distance = node_distance(machine, node.numa_node, other.home);
        apart = std::min(apart, distance);
      }
      const Cost cost{users,
                      nearness(machine, machine.gpus[gpu].numa_node, {node.numa_node}).distance,
                      -cores_a_rank, -apart};
      if (!best || cost < best->first) best = {cost, {node.numa_node, gpu}};
    }
  }
  CHECK(best.has_value());  // there are at least as many cores as ranks
  return best->second;
}

/// By rank, the indices of the GPUs that options.gpus names; none where the plan chooses.
std::vector<size_t> given_gpus(const Machine& machine, const PlacementOptions& options) {
  std::vector<size_t> given;
  for (const std::string& pci : options.gpus) {
    const auto gpu = std::ranges::find(machine.gpus, pci, &Gpu::pci);
    if (gpu == machine.gpus.end()) return {};
    given.push_back(static_cast<size_t>(gpu - machine.gpus.begin()));
  }
  CHECK(given.empty() || given.size() == options.ranks);
  return given;
}

std::vector<Seat> seat_ranks(const Machine& machine, const PlacementOptions& options) {
  const std::vector<NodeCores> nodes = usable_cores(machine, options.allowed);
  std::vector<Seat> seats;
  for (const size_t gpu : given_gpus(machine, options)) {
    seats.push_back(next_seat(machine, nodes, {gpu}, seats));
  }
  if (!seats.empty()) return seats;
  std::vector<size_t> all(machine.gpus.size());
  std::iota(all.begin(), all.end(), size_t{0});
  while (seats.size() < options.ranks) seats.push_back(next_seat(machine, nodes, all, seats));
  std::ranges::sort(seats, {}, [](const Seat& seat) { return std::pair(seat.home, seat.gpu); });
  return seats;
}

std::vector<CpuPlan> shares_without_gpus(const Machine& machine, const PlacementOptions& options) {
  std::vector<CpuPlan> shares;
  for (uint32_t rank = 0; rank < options.ranks; ++rank) {
    shares.push_back(plan_cpus(
        machine, {.allowed = options.allowed, .local_rank = rank, .local_ranks = options.ranks}));
  }
  return shares;
}

// ---- reasons ----

std::vector<uint32_t> nodes_of(const CpuPlan& share) {
  std::vector<uint32_t> nodes;
  for (const NodeCpus& node : share.nodes) nodes.push_back(node.numa_node);
  return nodes;
}

/// "rank 2", "nodes 4-7"
std::string numbers(const char* noun, const std::vector<uint32_t>& list) {
  return fmt::format("{}{} {}", noun, list.size() == 1 ? "" : "s", cpu_list(list));
}

std::string distance_text(const Machine& machine, uint32_t from, uint32_t to) {
  const bool known = !machine.numa_nodes.empty() && !machine.numa_nodes[0].distances.empty();
  return known ? fmt::format("distance {}", node_distance(machine, from, to)) : "distance unknown";
}

/// ", shared with ranks 1-3" or nothing.
std::string sharing(const std::vector<uint32_t>& users, uint32_t rank) {
  std::vector<uint32_t> others = users;
  std::erase(others, rank);
  return others.empty() ? "" : ", shared with " + numbers("rank", others);
}

std::vector<uint32_t> ranks_on_node(const std::vector<CpuPlan>& shares, uint32_t node) {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < shares.size(); ++rank) {
    if (std::ranges::count(nodes_of(shares[rank]), node) > 0) ranks.push_back(rank);
  }
  return ranks;
}

std::string cores_reason(const Machine& machine, uint32_t node, const Seat* seat) {
  if (seat == nullptr) return "the ranks divide the machine";
  if (node != seat->home) {
    return fmt::format("no rank is at home on it; node {} is nearest ({})", seat->home,
                       distance_text(machine, node, seat->home));
  }
  const int gpu_node = machine.gpus[seat->gpu].numa_node;
  if (gpu_node < 0) return "its GPU's node is unknown; the most cores a rank";
  if (static_cast<uint32_t>(gpu_node) == node) return "its GPU's node";
  return fmt::format("the nearest to its GPU with a core to spare ({})",
                     distance_text(machine, node, static_cast<uint32_t>(gpu_node)));
}

void place_cores(const Machine& machine, const std::vector<CpuPlan>& shares,
                 const std::vector<Seat>& seats, RankPlacement& placement) {
  for (uint32_t rank = 0; rank < shares.size(); ++rank) {
    const Seat* const seat = seats.empty() ? nullptr : &seats[rank];
    for (const NodeCpus& node : shares[rank].nodes) {
      placement.ranks[rank].cores.push_back(
          {.cpus = node,
           .reason = cores_reason(machine, node.numa_node, seat) +
                     sharing(ranks_on_node(shares, node.numa_node), rank)});
    }
  }
}

std::string gpu_reason(const Machine& machine, const Gpu& gpu, const std::vector<uint32_t>& nodes) {
  if (gpu.numa_node < 0) return "its NUMA node is unknown";
  const auto gpu_node = static_cast<uint32_t>(gpu.numa_node);
  const uint32_t near = nearness(machine, gpu.numa_node, nodes).node;
  if (near == gpu_node) return fmt::format("nearest to NUMA node {}", near);
  return fmt::format("on NUMA node {}; nearest to node {} ({})", gpu_node, near,
                     distance_text(machine, near, gpu_node));
}

void place_gpus(const Machine& machine, const std::vector<CpuPlan>& shares,
                const std::vector<Seat>& seats, RankPlacement& placement) {
  std::set<std::string> models;
  for (uint32_t rank = 0; rank < seats.size(); ++rank) {
    const Gpu& gpu = machine.gpus[seats[rank].gpu];
    models.insert(gpu.name);
    std::vector<uint32_t> users;
    for (uint32_t other = 0; other < seats.size(); ++other) {
      if (seats[other].gpu == seats[rank].gpu) users.push_back(other);
    }
    placement.ranks[rank].gpu = {
        .name = gpu.pci,
        .reason = gpu_reason(machine, gpu, nodes_of(shares[rank])) + sharing(users, rank)};
  }
  if (models.size() > 1) {
    placement.warnings.push_back(
        "the ranks' GPUs are of different models: the slowest sets the pace");
  }
  if (!seats.empty() && machine.gpus.size() < seats.size()) {
    placement.warnings.push_back(fmt::format("{} ranks share {} {}", seats.size(),
                                             machine.gpus.size(),
                                             machine.gpus.size() == 1 ? "GPU" : "GPUs"));
  }
}

// ---- memory ----

/// The node itself, or the nearest that has memory.
uint32_t memory_node(const Machine& machine, uint32_t node) {
  const NumaNode* best = nullptr;
  for (const NumaNode& other : machine.numa_nodes) {
    if (other.memory_bytes == 0) continue;
    if (other.index == node) return node;
    if (!best ||
        node_distance(machine, node, other.index) < node_distance(machine, node, best->index)) {
      best = &other;
    }
  }
  return best ? best->index : node;
}

void place_memory(const Machine& machine, RankPlacement& placement) {
  const auto cores_near = [&](const PlacedRank& rank, uint32_t memory) {
    uint64_t cores = 0;
    for (const PlacedCores& part : rank.cores) {
      if (memory_node(machine, part.cpus.numa_node) != memory) continue;
      cores += part.cpus.compute.size() + (part.cpus.io.empty() ? 0 : 1);
    }
    return cores;
  };
  for (PlacedRank& rank : placement.ranks) {
    for (const PlacedCores& part : rank.cores) {
      const uint32_t own = part.cpus.numa_node, near = memory_node(machine, own);
      if (std::ranges::count(rank.memory, near, &PlacedMemory::numa_node) > 0) continue;
      uint64_t all = 0;
      for (const PlacedRank& other : placement.ranks) all += cores_near(other, near);
      const auto node = std::ranges::find(machine.numa_nodes, near, &NumaNode::index);
      const uint64_t bytes = node == machine.numa_nodes.end() ? 0 : node->memory_bytes;
      const uint64_t cores = cores_near(rank, near);
      rank.memory.push_back(
          {.numa_node = near,
           .bytes = bytes / all * cores,
           .reason = near == own ? fmt::format("local; {} of {} cores near it", cores, all)
                                 : fmt::format("node {} has no memory; this is the nearest", own)});
    }
  }
}

// ---- drives ----

std::vector<Drive> drives_to_use(const Machine& machine, const PlacementOptions& options) {
  std::vector<Drive> drives;
  for (const std::string& name : options.drives) {
    const auto drive = std::ranges::find(machine.drives, name, &Drive::name);
    if (drive == machine.drives.end()) {
      fail(ErrorCode::invalid_config,
           "this machine has no drive \"{}\"; `overspill topology` lists its drives", name);
    }
    if (std::ranges::count(drives, name, &Drive::name) == 0) drives.push_back(*drive);
  }
  if (!options.drives.empty()) return drives;
  std::ranges::copy_if(machine.drives, std::back_inserter(drives),
                       [](const Drive& drive) { return drive.name.starts_with("nvme"); });
  return drives.empty() ? machine.drives : drives;
}

struct NearDrives {
  std::vector<Drive> drives;
  bool local = true;
};

NearDrives drives_near(const Machine& machine, std::vector<Drive> drives,
                       const std::vector<uint32_t>& nodes) {
  const auto is_local = [&](const Drive& drive) {
    return std::ranges::count(nodes, drive.numa_node) > 0;
  };
  if (std::ranges::any_of(drives, is_local)) {
    std::erase_if(drives, [&](const Drive& drive) { return !is_local(drive); });
    return {std::move(drives), true};
  }
  std::ranges::stable_sort(drives, {}, [&](const Drive& drive) {
    return drive.numa_node < 0 ? UINT32_MAX : nearness(machine, drive.numa_node, nodes).distance;
  });
  return {std::move(drives), false};
}

std::string drive_reason(const Machine& machine, const Drive& drive,
                         const std::vector<uint32_t>& nodes, bool local) {
  if (local) return fmt::format("on the rank's node {}", drive.numa_node);
  const std::string none =
      fmt::format("no drive is on {}: uses all drives", numbers("node", nodes));
  if (drive.numa_node < 0) return none + "; this one's node is unknown";
  const uint32_t near = nearness(machine, drive.numa_node, nodes).node;
  return fmt::format("{}; this one is on node {} ({})", none, drive.numa_node,
                     distance_text(machine, near, static_cast<uint32_t>(drive.numa_node)));
}

void place_drives(const Machine& machine, const std::vector<Drive>& usable,
                  const std::vector<CpuPlan>& shares, RankPlacement& placement) {
  std::vector<NearDrives> near;
  for (const CpuPlan& share : shares) near.push_back(drives_near(machine, usable, nodes_of(share)));
  for (uint32_t rank = 0; rank < shares.size(); ++rank) {
    for (const Drive& drive : near[rank].drives) {
      std::vector<uint32_t> users;
      for (uint32_t other = 0; other < near.size(); ++other) {
        if (std::ranges::count(near[other].drives, drive) > 0) users.push_back(other);
      }
      placement.ranks[rank].drives.push_back(
          {.name = drive.name,
           .reason = drive_reason(machine, drive, nodes_of(shares[rank]), near[rank].local) +
                     sharing(users, rank)});
    }
  }
}

void warn_of_unevenness(const std::vector<CpuPlan>& shares, RankPlacement& placement) {
  size_t least = SIZE_MAX, most = 0;
  for (const CpuPlan& share : shares) {
    const size_t cores = share.compute_cpus().size();
    least = std::min(least, cores);
    most = std::max(most, cores);
  }
  if (2 * least >= most) return;
  placement.warnings.push_back(fmt::format(
      "some ranks compute on {} cores, others on {}: the smallest sets the pace", least, most));
}

}  // namespace

RankPlacement plan_ranks(const Machine& machine, const PlacementOptions& options) {
  CHECK(options.ranks > 0);
  const std::vector<Drive> drives = drives_to_use(machine, options);
  std::vector<CpuPlan> shares = shares_without_gpus(machine, options);
  std::vector<Seat> seats;
  if (!machine.gpus.empty()) {
    seats = seat_ranks(machine, options);
    std::vector<uint32_t> homes;
    for (const Seat& seat : seats) homes.push_back(seat.home);
    shares = plan_cpus_at_homes(machine, options.allowed, homes);
  }
  RankPlacement placement{.ranks = std::vector<PlacedRank>(options.ranks), .warnings = {}};
  place_cores(machine, shares, seats, placement);
  place_memory(machine, placement);
  place_gpus(machine, shares, seats, placement);
  place_drives(machine, drives, shares, placement);
  warn_of_unevenness(shares, placement);
  return placement;
}

}  // namespace overspill
