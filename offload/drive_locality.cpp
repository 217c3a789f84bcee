// /sys/dev/block leads from a file system's device number to the drive.
#include "offload/drive_locality.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <charconv>

namespace overspill {
namespace {

namespace fs = std::filesystem;

/// Whether a list such as "0-15,32-47" has the number.
bool list_has(const std::string& list, uint32_t number) {
  const char* at = list.data();
  const char* const end = at + list.size();
  while (at < end) {
    uint32_t first = 0;
    at = std::from_chars(at, end, first).ptr;
    uint32_t last = first;
    if (at < end && *at == '-') at = std::from_chars(at + 1, end, last).ptr;
    if (number >= first && number <= last) return true;
    if (at < end && *at != ',') return false;  // not a list
    ++at;
  }
  return false;
}

}  // namespace

std::string drive_of(const fs::path& path) {
  std::error_code error;
  fs::path existing = fs::absolute(path, error);
  while (!fs::exists(existing, error) && existing.has_relative_path()) {
    existing = existing.parent_path();
  }
  struct stat status {};
  if (stat(existing.c_str(), &status) != 0) return "";
  const dev_t device = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
  const fs::path link = fmt::format("/sys/dev/block/{}:{}", major(device), minor(device));
  const fs::path directory = fs::canonical(link, error);
  if (error) return "";
  // A partition's directory lies in its drive's.
  const bool partition = fs::exists(directory / "partition", error);
  return (partition ? directory.parent_path() : directory).filename().string();
}

int node_of_cpus(const Machine& machine, std::span<const uint32_t> cpus) {
  for (const NumaNode& node : machine.numa_nodes) {
    const auto here = [&](uint32_t cpu) { return list_has(node.cpus, cpu); };
    if (!cpus.empty() && std::ranges::all_of(cpus, here)) return static_cast<int>(node.index);
  }
  return -1;
}

std::vector<uint32_t> allowed_cpus() {
  std::vector<uint32_t> cpus;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cpus;
  for (uint32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<size_t> drives_on_node(std::span<const std::string> drives, const Machine& machine,
                                   int node) {
  std::vector<size_t> near;
  for (size_t i = 0; i < drives.size(); ++i) {
    const auto found = std::ranges::find(machine.drives, drives[i], &Drive::name);
    if (found != machine.drives.end() && found->numa_node == node && node >= 0) near.push_back(i);
  }
  return near;
}

}  // namespace overspill
