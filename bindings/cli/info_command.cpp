// Gathers one report, then prints it as text or JSON. Reads only; settings that hurt get a cure.
#include "bindings/cli/info_command.h"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "bindings/cli/machine_json.h"
#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/units.h"
#include "nvme/async_io.h"
#include "offload/cpu_plan.h"
#include "offload/cuda_device.h"
#include "offload/drive_locality.h"
#include "offload/topology.h"

namespace overspill {
namespace {

constexpr uint64_t kSmallMemlockBytes = kGiB;
constexpr const char* kMemlockCure =
    "`ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, or `--ulimit memlock=-1` for "
    "a container";

struct Report {
  Machine machine;
  CpuPlan cpus;  ///< of a run that has the machine to itself
  CudaGpus cuda;
  std::map<std::string, std::vector<std::string>> mounts;  ///< by drive name
  std::string kernel;
  std::string io_backend;
  std::string io_uring_features;
  std::string io_uring_disabled;  ///< empty: the kernel has no such setting
  std::string huge_pages;         ///< "always", "madvise", "never"; empty: unknown
  uint64_t memlock_bytes = 0;
};

std::string text_or_empty(const char* path) {
  try {
    const std::string text = read_text_file(path);
    return text.substr(0, text.find('\n'));
  } catch (const Error&) {
    return "";
  }
}

/// "madvise" of "always [madvise] never".
std::string bracketed(const std::string& text) {
  const size_t open = text.find('['), close = text.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return "";
  return text.substr(open + 1, close - open - 1);
}

/// Whether `device` ("nvme0n1p2") is the drive ("nvme0n1") or a partition of it.
bool belongs_to(const std::string& device, const std::string& drive) {
  if (!device.starts_with(drive)) return false;
  std::string rest = device.substr(drive.size());
  const bool needs_p = drive.back() >= '0' && drive.back() <= '9';
  if (!rest.empty() && needs_p) {
    if (rest[0] != 'p') return false;
    rest.erase(0, 1);
    if (rest.empty()) return false;
  }
  return rest.find_first_not_of("0123456789") == std::string::npos;
}

/// Where partitions of the drives are mounted; device-mapper and RAID devices are not followed.
std::map<std::string, std::vector<std::string>> read_mounts(const std::vector<Drive>& drives) {
  std::map<std::string, std::vector<std::string>> mounts;
  const char* const xml = std::getenv("HWLOC_XMLFILE");
  if (xml && *xml) return mounts;  // the drives are another host's
  std::istringstream lines;
  try {
    lines.str(read_text_file("/proc/self/mounts"));
  } catch (const Error&) {
    return mounts;
  }
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string device, directory;
    fields >> device >> directory;
    if (!device.starts_with("/dev/")) continue;
    for (const Drive& drive : drives) {
      if (belongs_to(device.substr(5), drive.name)) mounts[drive.name].push_back(directory);
    }
  }
  return mounts;
}

std::string read_kernel() {
  utsname name{};
  if (::uname(&name) != 0) return "unknown";
  return fmt::format("{} {} {}", name.sysname, name.release, name.machine);
}

CudaGpus find_cuda_gpus(bool here) {
  if (!here) return {.gpus = {}, .absence = "not asked: the description is another host's"};
  try {
    return cuda_devices();
  } catch (const Error& error) {
    return {.gpus = {}, .absence = error.what()};
  }
}

/// -1 when unknown.
int node_of_gpu(const Machine& machine, const CudaGpu& gpu) {
  const auto found = std::ranges::find(machine.gpus, gpu.pci, &Gpu::pci);
  return found == machine.gpus.end() ? -1 : found->numa_node;
}

Report gather() {
  Report report;
  report.machine = read_machine();
  const bool here = report.machine.is_this_system;
  report.cpus =
      plan_cpus(report.machine, {.allowed = here ? allowed_cpus() : std::vector<uint32_t>{}});
  report.cuda = find_cuda_gpus(here);
  report.mounts = read_mounts(report.machine.drives);
  report.kernel = read_kernel();
  report.io_backend = describe_io_backend();
  report.io_uring_features = describe_io_uring_features();
  report.io_uring_disabled = text_or_empty("/proc/sys/kernel/io_uring_disabled");
  report.huge_pages = bracketed(text_or_empty("/sys/kernel/mm/transparent_hugepage/enabled"));
  report.memlock_bytes = memlock_limit_bytes();
  return report;
}

// ---- text ----

void print_row(const char* name, const std::string& value) {
  fmt::print("{:<18}{}\n", name, value);
}

std::string or_unknown(const std::string& text) { return text.empty() ? "unknown" : text; }

std::string node_text(int numa_node) {
  return numa_node < 0 ? "any NUMA node" : fmt::format("NUMA node {}", numa_node);
}

std::string cache_text(const Machine& machine) {
  const std::string l2 =
      machine.l2_bytes == 0 ? "" : fmt::format("L2 {} per core", format_bytes(machine.l2_bytes));
  if (machine.l3_bytes == 0) return or_unknown(l2);
  return fmt::format("{}{}L3 {} x {}", l2, l2.empty() ? "" : ", ", format_bytes(machine.l3_bytes),
                     machine.l3_domains);
}

std::string drive_text(const Report& report, const Drive& drive) {
  std::string text =
      fmt::format("{:<10} {:>12}  {:<13}  {}", drive.name,
                  drive.size_bytes == 0 ? "size unknown" : format_bytes(drive.size_bytes),
                  node_text(drive.numa_node), drive.model.empty() ? "model unknown" : drive.model);
  if (drive.rotational) text += " (rotational)";
  const auto mounts = report.mounts.find(drive.name);
  if (mounts == report.mounts.end()) return text;
  return fmt::format("{}, mounted at {}", text, fmt::join(mounts->second, ", "));
}

std::string io_uring_setting_text(const std::string& setting) {
  if (setting.empty()) return "no such setting in this kernel (io_uring is allowed)";
  if (setting == "0") return "0 (allowed)";
  return fmt::format("{} ({}; allow it with `sysctl kernel.io_uring_disabled=0`)", setting,
                     setting == "1" ? "only for privileged processes" : "forbidden");
}

std::string memlock_text(uint64_t bytes) {
  if (bytes == UINT64_MAX) return "unlimited";
  if (bytes >= kSmallMemlockBytes) return format_bytes(bytes);
  return fmt::format("{} (small for pinned buffers; raise it with {})", format_bytes(bytes),
                     kMemlockCure);
}

std::string huge_pages_text(const std::string& setting) {
  if (setting != "never") return or_unknown(setting);
  return "never (large buffers are faster with `madvise` in "
         "/sys/kernel/mm/transparent_hugepage/enabled)";
}

std::string compute_text(const CpuPlan& plan) {
  std::string lists;
  for (const NodeCpus& node : plan.nodes) {
    lists += (lists.empty() ? "" : " | ") + cpu_list(node.compute);
  }
  return fmt::format(
      "{} in {}, {} cpus {}", plan.compute_cpus().size(),
      plan.nodes.size() == 1 ? "1 group" : fmt::format("{} groups", plan.nodes.size()),
      plan.pinned ? "kept on" : "free on", lists);
}

std::string cuda_text(const Machine& machine, const CudaGpu& gpu) {
  std::string text =
      fmt::format("{:<2} {:<12} {:<13}  {}, {}, compute capability {}.{}", gpu.index, gpu.pci,
                  node_text(node_of_gpu(machine, gpu)), gpu.name, format_bytes(gpu.memory_bytes),
                  gpu.capability_major, gpu.capability_minor);
  if (gpu.peers.empty()) return text;
  return fmt::format("{}, reaches memory of GPU {}", text, fmt::join(gpu.peers, ", "));
}

void print_machine(const Report& report) {
  const Machine& machine = report.machine;
  print_row("cpu", fmt::format("{}, {} cores, {} threads", or_unknown(machine.cpu_model),
                               machine.cores, machine.hardware_threads));
  print_row("caches", cache_text(machine));
  print_row("memory", format_bytes(machine.memory_bytes));
  const char* name = "numa nodes";
  for (const NumaNode& node : machine.numa_nodes) {
    print_row(std::exchange(name, ""), fmt::format("{:<10} {:>12}  cpus {}", node.index,
                                                   format_bytes(node.memory_bytes), node.cpus));
  }
  print_row("compute threads", compute_text(report.cpus));
  print_row("i/o threads", "cpus " + cpu_list(report.cpus.io_cpus()));
  name = "drives";
  if (machine.drives.empty()) print_row(name, "none");
  for (const Drive& drive : machine.drives) {
    print_row(std::exchange(name, ""), drive_text(report, drive));
  }
  name = "gpus";
  if (machine.gpus.empty()) print_row(name, "none");
  for (const Gpu& gpu : machine.gpus) {
    print_row(std::exchange(name, ""),
              fmt::format("{:<12} {:<13}  {}", gpu.pci, node_text(gpu.numa_node), gpu.name));
  }
  name = "cuda gpus";
  if (report.cuda.gpus.empty()) print_row(name, "none: " + report.cuda.absence);
  for (const CudaGpu& gpu : report.cuda.gpus) {
    print_row(std::exchange(name, ""), cuda_text(machine, gpu));
  }
}

void print_text(const Report& report) {
  print_machine(report);
  print_row("kernel", report.kernel);
  print_row("i/o backend", report.io_backend);
  print_row("io_uring", report.io_uring_features);
  print_row("io_uring_disabled", io_uring_setting_text(report.io_uring_disabled));
  print_row("huge pages", huge_pages_text(report.huge_pages));
  print_row("memlock limit", memlock_text(report.memlock_bytes));
}

// ---- JSON ----

using Json = nlohmann::ordered_json;

Json text_json(const std::string& text) { return text.empty() ? Json() : Json(text); }

Json cuda_json(const Report& report) {
  Json gpus = Json::array();
  for (const CudaGpu& gpu : report.cuda.gpus) {
    const int node = node_of_gpu(report.machine, gpu);
    gpus.push_back(
        {{"index", gpu.index},
         {"name", gpu.name},
         {"pci", gpu.pci},
         {"numa_node", node < 0 ? Json() : Json(node)},
         {"memory_bytes", gpu.memory_bytes},
         {"compute_capability", fmt::format("{}.{}", gpu.capability_major, gpu.capability_minor)},
         {"peers", gpu.peers}});
  }
  return {{"gpus", gpus}, {"absence", text_json(report.cuda.absence)}};
}

Json report_json(const Report& report) {
  Json machine = machine_json(report.machine);
  for (Json& drive : machine["drives"]) {
    const auto mounts = report.mounts.find(drive["name"]);
    drive["mounts"] = mounts == report.mounts.end() ? Json::array() : Json(mounts->second);
  }
  machine["compute_groups"] = Json::array();
  for (const NodeCpus& node : report.cpus.nodes) {
    machine["compute_groups"].push_back(
        {{"numa_node", node.numa_node}, {"cpus", cpu_list(node.compute)}});
  }
  machine["compute_pinned"] = report.cpus.pinned;
  machine["io_cpus"] = cpu_list(report.cpus.io_cpus());
  const bool unlimited = report.memlock_bytes == UINT64_MAX;
  return {{"machine", machine},
          {"cuda", cuda_json(report)},
          {"kernel", report.kernel},
          {"io_backend", report.io_backend},
          {"io_uring_features", report.io_uring_features},
          {"io_uring_disabled", text_json(report.io_uring_disabled)},
          {"transparent_huge_pages", text_json(report.huge_pages)},
          {"memlock_limit_bytes", unlimited ? Json() : Json(report.memlock_bytes)}};
}

}  // namespace

void run_info(bool as_json) {
  const Report report = gather();
  as_json ? print_json(report_json(report)) : print_text(report);
}

}  // namespace overspill
