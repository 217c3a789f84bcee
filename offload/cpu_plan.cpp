// Dividing cores. Cores of a node, and of a cache, follow each other in Machine::core_list; every
// share is a piece of that order.
#include "offload/cpu_plan.h"

#include <algorithm>

#include "engine/base/error.h"

namespace overspill {
namespace {

/// From so many cores on, a node's share gives one of them to I/O.
constexpr size_t kCoresWorthReserving = 8;

struct NodeCores {
  uint32_t numa_node;
  std::vector<Core> cores;
};

/// The cores that may be used, with only those of their CPUs that may, by node.
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

/// The share of one of several ranks on a node.
std::vector<Core> share_of(const std::vector<Core>& cores, size_t rank, size_t ranks) {
  std::vector<size_t> domains;  // where each L3 domain begins
  for (size_t i = 0; i < cores.size(); ++i) {
    if (i == 0 || cores[i].l3_domain != cores[i - 1].l3_domain) domains.push_back(i);
  }
  const bool whole_domains = domains.size() % ranks == 0;
  const size_t pieces = whole_domains ? domains.size() : cores.size();
  const auto cut = [&](size_t r) {
    const size_t piece = pieces * r / ranks;
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
  for (const NodeCores& share :
       rank_share(std::move(nodes), options.local_rank, options.local_ranks)) {
    plan.nodes.push_back(assign(share));
  }
  plan.pinned = options.local_ranks > 1 || plan.nodes.size() > 1 || !plan.nodes.front().io.empty();
  return plan;
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
