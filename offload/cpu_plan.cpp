// Dividing cores. Cores of a node, and of a cache, follow each other in Machine::core_list; every
// share is a piece of that order.
#include "offload/cpu_plan.h"

#include <algorithm>
#include <iterator>
#include <ranges>

#include "engine/base/error.h"

namespace overspill {
namespace {

/// From so many cores on, a node's share gives one of them to I/O.
constexpr size_t kCoresWorthReserving = 8;

/// Ranks on each node: at least one, each further one where it has the most cores to itself.
std::vector<size_t> ranks_on(const std::vector<NodeCores>& nodes, size_t ranks) {
  std::vector<size_t> counts(nodes.size(), 1);
  for (size_t placed = nodes.size(); placed < ranks; ++placed) {
    size_t best = 0;
    for (size_t n = 1; n < nodes.size(); ++n) {
      // cores / (ranks + 1), compared without division
      if (nodes[n].cores.size() * (counts[best] + 1) > nodes[best].cores.size() * (counts[n] + 1)) {
        best = n;
      }
    }
    ++counts[best];
  }
  return counts;
}

enum class Rounding { down, up };

/// The share of one of several ranks. Where cores do not divide evenly, rounding down favours other
/// ranks than rounding up.
std::vector<Core> share_of(const std::vector<Core>& cores, size_t rank, size_t ranks,
                           Rounding rounding = Rounding::down) {
  std::vector<size_t> domains;  // where each L3 domain begins
  for (size_t i = 0; i < cores.size(); ++i) {
    if (i == 0 || cores[i].l3_domain != cores[i - 1].l3_domain) domains.push_back(i);
  }
  const bool whole_domains = domains.size() % ranks == 0;
  const size_t pieces = whole_domains ? domains.size() : cores.size();
  const auto cut = [&](size_t r) {
    const size_t piece = (pieces * r + (rounding == Rounding::up ? ranks - 1 : 0)) / ranks;
    return piece == pieces ? cores.size() : whole_domains ? domains[piece] : piece;
  };
  return {cores.begin() + static_cast<ptrdiff_t>(cut(rank)),
          cores.begin() + static_cast<ptrdiff_t>(cut(rank + 1))};
}

std::vector<NodeCores> rank_share(std::vector<NodeCores> nodes, size_t rank, size_t ranks) {
  if (ranks <= nodes.size()) {
    const auto cut = [&](size_t r) {
      return nodes.begin() + static_cast<ptrdiff_t>(nodes.size() * r / ranks);
    };
    return {cut(rank), cut(rank + 1)};
  }
  const std::vector<size_t> counts = ranks_on(nodes, ranks);
  size_t n = 0;
  for (; rank >= counts[n]; ++n) rank -= counts[n];
  return {{nodes[n].numa_node, share_of(nodes[n].cores, rank, counts[n])}};
}

NodeCpus assign(const NodeCores& share) {
  NodeCpus node{.numa_node = share.numa_node, .compute = {}, .io = {}, .idle = {}};
  // The first core, which the system's own work prefers: the others keep an even pace.
  const size_t reserved = share.cores.size() >= kCoresWorthReserving ? 1 : 0;
  for (size_t i = 0; i < share.cores.size(); ++i) {
    const std::vector<uint32_t>& cpus = share.cores[i].cpus;
    if (i < reserved) {
      node.io.insert(node.io.end(), cpus.begin(), cpus.end());
    } else {
      node.compute.push_back(cpus[0]);
      node.idle.insert(node.idle.end(), cpus.begin() + 1, cpus.end());
    }
  }
  return node;
}

/// Whether the system's scheduler has to be told; see CpuPlan::pinned.
bool needs_pinning(const CpuPlan& plan, size_t ranks) {
  return ranks > 1 || plan.nodes.size() > 1 || !plan.nodes.front().io.empty();
}

/// Cores that the same ranks divide.
struct CorePool {
  Rounding rounding;
  std::vector<size_t> ranks;
  std::vector<Core> cores;
};

/// Ranks whose homes are nearest to the node: those at home on it, when there are any.
std::vector<size_t> nearest_ranks(const Machine& machine, uint32_t node,
                                  std::span<const uint32_t> homes) {
  const auto distance = [&](uint32_t home) {
    return home == node ? 0 : node_distance(machine, node, home);
  };
  const uint32_t least = std::ranges::min(homes | std::views::transform(distance));
  std::vector<size_t> ranks;
  for (size_t rank = 0; rank < homes.size(); ++rank) {
    if (distance(homes[rank]) == least) ranks.push_back(rank);
  }
  return ranks;
}

/// A pool a home; nodes that are no home share one where their nearest ranks are the same.
std::vector<CorePool> core_pools(const Machine& machine, const std::vector<NodeCores>& nodes,
                                 std::span<const uint32_t> homes) {
  std::vector<CorePool> at_home, between;
  for (const NodeCores& node : nodes) {
    std::vector<size_t> ranks = nearest_ranks(machine, node.numa_node, homes);
    if (std::ranges::count(homes, node.numa_node) > 0) {
      at_home.push_back({Rounding::down, std::move(ranks), node.cores});
      continue;
    }
    auto pool = std::ranges::find(between, ranks, &CorePool::ranks);
    if (pool == between.end()) pool = between.insert(pool, {Rounding::up, std::move(ranks), {}});
    pool->cores.insert(pool->cores.end(), node.cores.begin(), node.cores.end());
  }
  std::ranges::move(between, std::back_inserter(at_home));
  return at_home;
}

void add_cores(std::vector<NodeCores>& share, const std::vector<Core>& cores) {
  for (const Core& core : cores) {
    auto node = std::ranges::find(share, core.numa_node, &NodeCores::numa_node);
    if (node == share.end()) node = share.insert(node, {core.numa_node, {}});
    node->cores.push_back(core);
  }
}

std::vector<uint32_t> collect(const std::vector<NodeCpus>& nodes,
                              std::initializer_list<std::vector<uint32_t> NodeCpus::*> kinds) {
  std::vector<uint32_t> cpus;
  for (const NodeCpus& node : nodes) {
    for (const auto kind : kinds) {
      cpus.insert(cpus.end(), (node.*kind).begin(), (node.*kind).end());
    }
  }
  std::ranges::sort(cpus);
  return cpus;
}

}  // namespace

std::vector<uint32_t> CpuPlan::compute_cpus() const { return collect(nodes, {&NodeCpus::compute}); }

std::vector<uint32_t> CpuPlan::io_cpus() const {
  std::vector<uint32_t> reserved = collect(nodes, {&NodeCpus::io});
  return reserved.empty() ? all_cpus() : reserved;
}

std::vector<uint32_t> CpuPlan::all_cpus() const {
  return collect(nodes, {&NodeCpus::compute, &NodeCpus::io, &NodeCpus::idle});
}

std::vector<NodeCores> usable_cores(const Machine& machine, const std::vector<uint32_t>& allowed) {
  std::vector<NodeCores> nodes;
  for (Core core : machine.core_list) {
    if (!allowed.empty()) {
      std::erase_if(core.cpus, [&](uint32_t cpu) { return !std::ranges::count(allowed, cpu); });
    }
    if (core.cpus.empty()) continue;
    auto node = std::ranges::find(nodes, core.numa_node, &NodeCores::numa_node);
    if (node == nodes.end()) node = nodes.insert(node, {core.numa_node, {}});
    node->cores.push_back(std::move(core));
  }
  return nodes;
}

CpuPlan plan_cpus(const Machine& machine, const CpuPlanOptions& options) {
  CHECK(options.local_rank < options.local_ranks);
  std::vector<NodeCores> nodes = usable_cores(machine, options.allowed);
  size_t cores = 0;
  for (const NodeCores& node : nodes) cores += node.cores.size();
  if (cores < options.local_ranks) {
    fail(ErrorCode::invalid_config,
         "{} ranks on this machine, but this process may use only {} of its {} cores; start fewer "
         "ranks on it, or allow them more CPUs (taskset, cgroup cpuset)",
         options.local_ranks, cores, machine.core_list.size());
  }
  CpuPlan plan;
  const std::vector<NodeCores> shares =
      rank_share(std::move(nodes), options.local_rank, options.local_ranks);
  for (const NodeCores& share : shares) {
    plan.nodes.push_back(assign(share));
  }
  plan.pinned = needs_pinning(plan, options.local_ranks);
  return plan;
}

std::vector<CpuPlan> plan_cpus_at_homes(const Machine& machine,
                                        const std::vector<uint32_t>& allowed,
                                        std::span<const uint32_t> homes) {
  CHECK(!homes.empty());
  const std::vector<NodeCores> nodes = usable_cores(machine, allowed);
  for (const uint32_t home : homes) {
    const auto node = std::ranges::find(nodes, home, &NodeCores::numa_node);
    const size_t cores = node == nodes.end() ? 0 : node->cores.size();
    const auto ranks = static_cast<size_t>(std::ranges::count(homes, home));
    if (cores < ranks) {
      fail(
          ErrorCode::invalid_config,
          "{} ranks on NUMA node {}, of which this process may use {} cores; start fewer ranks, or "
          "allow them more CPUs (taskset, cgroup cpuset)",
          ranks, home, cores);
    }
  }
  std::vector<std::vector<NodeCores>> shares(homes.size());
  for (const CorePool& pool : core_pools(machine, nodes, homes)) {
    for (size_t i = 0; i < pool.ranks.size(); ++i) {
      add_cores(shares[pool.ranks[i]], share_of(pool.cores, i, pool.ranks.size(), pool.rounding));
    }
  }
  std::vector<CpuPlan> plans(homes.size());
  for (size_t rank = 0; rank < homes.size(); ++rank) {
    for (const NodeCores& share : shares[rank]) plans[rank].nodes.push_back(assign(share));
    plans[rank].pinned = needs_pinning(plans[rank], homes.size());
  }
  return plans;
}

std::vector<ParallelGroup> parallel_groups_of(const CpuPlan& plan) {
  std::vector<ParallelGroup> groups;
  for (const NodeCpus& node : plan.nodes) {
    groups.push_back({.cpus = plan.pinned ? node.compute : std::vector<uint32_t>{},
                      .threads = static_cast<uint32_t>(node.compute.size())});
  }
  if (groups.empty()) groups.emplace_back();
  return groups;
}

std::string cpu_list(std::vector<uint32_t> cpus) {
  std::ranges::sort(cpus);
  std::string text;
  for (size_t i = 0; i < cpus.size();) {
    size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", cpus[i]);
    if (last > i) text += fmt::format("-{}", cpus[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace overspill
