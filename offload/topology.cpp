// The machine through hwloc, with /sys/block as the second source of drives. A topology read from
// a file describes another host, so nothing of this one's /sys is mixed into it.
#include "offload/topology.h"

#include <hwloc.h>
#include <hwloc/distances.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "offload/topology_xml.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

/// What hwloc does not tell is kept in the files as attributes of these names.
constexpr const char* kMemoryBytes = "OverspillMemoryBytes";
constexpr const char* kRotational = "OverspillRotational";

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

std::string attribute(hwloc_obj_t object, const char* name) {
  const char* const text = hwloc_obj_get_info_by_name(object, name);
  return text ? trimmed(text) : "";
}

uint32_t count_of(const Topology& topology, hwloc_obj_type_t type) {
  return static_cast<uint32_t>(std::max(0, hwloc_get_nbobjs_by_type(topology.get(), type)));
}

uint64_t cache_bytes(const Topology& topology, hwloc_obj_type_t type) {
  const hwloc_obj_t cache = hwloc_get_obj_by_type(topology.get(), type, 0);
  return cache ? cache->attr->cache.size : 0;
}

std::string bitmap_list(hwloc_const_bitmap_t bitmap) {
  if (!bitmap) return "";
  std::string text(static_cast<size_t>(hwloc_bitmap_list_snprintf(nullptr, 0, bitmap)), '\0');
  hwloc_bitmap_list_snprintf(text.data(), text.size() + 1, bitmap);
  return text;
}

/// The one NUMA node that an I/O object is close to; -1 when it is close to several.
int node_of(const Topology& topology, hwloc_obj_t io_object) {
  const hwloc_obj_t ancestor = hwloc_get_non_io_ancestor_obj(topology.get(), io_object);
  if (!ancestor || !ancestor->nodeset) return -1;
  return hwloc_bitmap_weight(ancestor->nodeset) == 1 ? hwloc_bitmap_first(ancestor->nodeset) : -1;
}

// ---- drives ----

bool is_virtual_drive(std::string_view name) {
  constexpr std::array<std::string_view, 7> kPrefixes = {"loop", "ram", "zram", "dm-",
                                                         "sr",   "fd",  "nbd"};
  return std::ranges::any_of(kPrefixes,
                             [&](std::string_view prefix) { return name.starts_with(prefix); });
}

/// First line of a file in /sys, without spaces around it; empty when it cannot be read.
std::string sys_text(const fs::path& path) {
  try {
    const std::string text = read_text_file(path);
    return trimmed(text.substr(0, text.find('\n')));
  } catch (const Error&) {
    return "";
  }
}

template <class Number>
std::optional<Number> parse_number(const std::string& text) {
  Number number{};
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  return number;
}

Drive read_sys_drive(const fs::path& directory) {
  Drive drive;
  drive.name = directory.filename().string();
  drive.model = sys_text(directory / "device/model");
  drive.size_bytes = 512 * parse_number<uint64_t>(sys_text(directory / "size")).value_or(0);
  drive.rotational = sys_text(directory / "queue/rotational") == "1";
  const std::string direct = sys_text(directory / "device/numa_node");
  drive.numa_node =
      parse_number<int>(direct.empty() ? sys_text(directory / "device/device/numa_node") : direct)
          .value_or(-1);
  return drive;
}

std::vector<Drive> read_sys_drives() {
  std::vector<Drive> drives;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator("/sys/block", ignored)) {
    if (is_virtual_drive(entry.path().filename().string())) continue;
    if (sys_text(entry.path() / "hidden") == "1") continue;  // a path of a multipath NVMe drive
    drives.push_back(read_sys_drive(entry.path()));
  }
  return drives;
}

std::vector<Drive> read_drives(const Topology& topology) {
  const bool here = hwloc_topology_is_thissystem(topology.get());
  std::vector<Drive> drives;
  hwloc_obj_t device = nullptr;
  while ((device = hwloc_get_next_osdev(topology.get(), device))) {
    if (device->attr->osdev.type != HWLOC_OBJ_OSDEV_BLOCK) continue;
    if (!device->name || is_virtual_drive(device->name)) continue;
    Drive drive;
    drive.name = device->name;
    drive.model = attribute(device, "Model");
    drive.size_bytes = 1024 * parse_number<uint64_t>(attribute(device, "Size")).value_or(0);
    drive.numa_node = node_of(topology, device);
    drive.rotational = here ? sys_text("/sys/block/" + drive.name + "/queue/rotational") == "1"
                            : attribute(device, kRotational) == "1";
    drives.push_back(std::move(drive));
  }
  if (drives.empty() && here) drives = read_sys_drives();
  std::ranges::sort(drives, {}, &Drive::name);
  return drives;
}

// ---- GPUs ----

using PciAttributes = decltype(hwloc_obj_attr_u::pcidev);

bool is_accelerator(const PciAttributes& pci) {
  constexpr unsigned kAspeed = 0x1a03, kMatrox = 0x102b, kIntel = 0x8086;
  switch (pci.class_id >> 8) {
    case 0x03:  // display controllers; those two only serve a server's console
      return pci.vendor_id != kAspeed && pci.vendor_id != kMatrox;
    case 0x12:  // processing accelerators
      return true;
    case 0x0b:  // co-processors; Intel's are for cryptography
      return pci.class_id == 0x0b40 && pci.vendor_id != kIntel;
    default: return false;
  }
}

std::string words(const std::string& vendor, const std::string& model) {
  return vendor.empty() || model.empty() ? vendor + model : vendor + " " + model;
}

std::string gpu_name(hwloc_obj_t device) {
  const std::string by_ids = words(attribute(device, "PCIVendor"), attribute(device, "PCIDevice"));
  if (!by_ids.empty()) return by_ids;
  for (hwloc_obj_t child = device->io_first_child; child; child = child->next_sibling) {
    const std::string by_driver =
        words(attribute(child, "GPUVendor"), attribute(child, "GPUModel"));
    if (!by_driver.empty()) return by_driver;
  }
  const PciAttributes& pci = device->attr->pcidev;
  return fmt::format("PCI device {:04x}:{:04x}", pci.vendor_id, pci.device_id);
}

std::vector<Gpu> read_gpus(const Topology& topology) {
  std::vector<Gpu> gpus;
  hwloc_obj_t device = nullptr;
  while ((device = hwloc_get_next_pcidev(topology.get(), device))) {
    const PciAttributes& pci = device->attr->pcidev;
    if (!is_accelerator(pci)) continue;
    gpus.push_back(
        {.name = gpu_name(device),
         .pci = fmt::format("{:04x}:{:02x}:{:02x}.{:x}", pci.domain, pci.bus, pci.dev, pci.func),
         .numa_node = node_of(topology, device)});
  }
  std::ranges::sort(gpus, {}, &Gpu::pci);
  return gpus;
}

// ---- processors and memory ----

/// Fills the nodes' distances from the system's table, where there is one.
void read_distances(const Topology& topology, std::vector<NumaNode>& nodes) {
  unsigned count = 1;
  hwloc_distances_s* table = nullptr;
  if (hwloc_distances_get_by_type(topology.get(), HWLOC_OBJ_NUMANODE, &count, &table,
                                  HWLOC_DISTANCES_KIND_MEANS_LATENCY, 0) != 0 ||
      count == 0) {
    return;
  }
  const unsigned size = table->nbobjs;
  const auto row_of = [&](uint32_t node) {
    unsigned row = 0;
    while (row < size && !(table->objs[row] && table->objs[row]->os_index == node)) ++row;
    return row;
  };
  const bool complete =
      std::ranges::all_of(nodes, [&](const NumaNode& node) { return row_of(node.index) < size; });
  for (NumaNode& from : nodes) {
    for (const NumaNode& to : nodes) {
      if (!complete) continue;
      const uint64_t value = table->values[row_of(from.index) * size + row_of(to.index)];
      from.distances.push_back(static_cast<uint32_t>(value));
    }
  }
  hwloc_distances_release(topology.get(), table);
}

std::vector<NumaNode> read_numa_nodes(const Topology& topology) {
  std::vector<NumaNode> nodes;
  hwloc_obj_t node = nullptr;
  while ((node = hwloc_get_next_obj_by_type(topology.get(), HWLOC_OBJ_NUMANODE, node))) {
    nodes.push_back({.index = node->os_index,
                     .memory_bytes = node->attr->numanode.local_memory,
                     .cpus = bitmap_list(node->cpuset)});
  }
  std::ranges::sort(nodes, {}, &NumaNode::index);
  read_distances(topology, nodes);
  return nodes;
}

constexpr uint32_t kNoNode = UINT32_MAX;

Core read_core(const Topology& topology, hwloc_obj_t core) {
  Core read{};
  const bool has_node = core->nodeset && !hwloc_bitmap_iszero(core->nodeset);
  read.numa_node = has_node ? static_cast<uint32_t>(hwloc_bitmap_first(core->nodeset)) : kNoNode;
  const hwloc_obj_t package =
      hwloc_get_ancestor_obj_by_type(topology.get(), HWLOC_OBJ_PACKAGE, core);
  read.package = package ? package->logical_index : 0;
  const hwloc_obj_t l3 = hwloc_get_ancestor_obj_by_type(topology.get(), HWLOC_OBJ_L3CACHE, core);
  read.l3_domain = l3 ? l3->logical_index : read.numa_node;
  for (int cpu = hwloc_bitmap_first(core->cpuset); cpu >= 0;
       cpu = hwloc_bitmap_next(core->cpuset, cpu)) {
    read.cpus.push_back(static_cast<uint32_t>(cpu));
  }
  return read;
}

/// Cores of a die without memory belong to no node. Each of their L3 domains goes to the node that
/// has the fewest cores, so that the nodes' shares are even.
void adopt_cores(std::vector<Core>& cores, const std::vector<NumaNode>& nodes) {
  const auto load = [&](uint32_t node) {
    return std::ranges::count(cores, node, &Core::numa_node);
  };
  for (size_t begin = 0, end = 0; begin < cores.size(); begin = end) {
    const uint32_t domain = cores[begin].l3_domain;
    while (end < cores.size() && cores[end].l3_domain == domain) ++end;
    if (cores[begin].numa_node != kNoNode) continue;
    uint32_t best = nodes.empty() ? 0 : nodes.front().index;
    for (const NumaNode& node : nodes) {
      if (load(node.index) < load(best)) best = node.index;
    }
    for (size_t i = begin; i < end; ++i) cores[i].numa_node = best;
  }
  std::ranges::stable_sort(cores, {}, &Core::numa_node);
}

std::vector<Core> read_cores(const Topology& topology, const std::vector<NumaNode>& nodes) {
  // Some virtual machines describe no cores: then each hardware thread is one.
  const bool has_cores = count_of(topology, HWLOC_OBJ_CORE) > 0;
  const hwloc_obj_type_t type = has_cores ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
  std::vector<Core> cores;
  hwloc_obj_t core = nullptr;
  while ((core = hwloc_get_next_obj_by_type(topology.get(), type, core))) {
    cores.push_back(read_core(topology, core));
  }
  adopt_cores(cores, nodes);
  return cores;
}

std::string read_cpu_model(const Topology& topology) {
  const hwloc_obj_t package = hwloc_get_obj_by_type(topology.get(), HWLOC_OBJ_PACKAGE, 0);
  const std::string model = package ? attribute(package, "CPUModel") : "";
  return model.empty() ? attribute(hwloc_get_root_obj(topology.get()), "CPUModel") : model;
}

uint64_t usable_memory_bytes(const Topology& topology) {
  const hwloc_obj_t root = hwloc_get_root_obj(topology.get());
  if (!hwloc_topology_is_thissystem(topology.get())) {
    return parse_number<uint64_t>(attribute(root, kMemoryBytes)).value_or(root->total_memory);
  }
  // Memory added to a running virtual machine may belong to no node.
  const uint64_t installed = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                             static_cast<uint64_t>(::sysconf(_SC_PAGE_SIZE));
  return std::min(std::max<uint64_t>(root->total_memory, installed), container_memory_bytes());
}

Machine describe(const Topology& topology) {
  Machine machine;
  machine.cpu_model = read_cpu_model(topology);
  machine.packages = std::max(1u, count_of(topology, HWLOC_OBJ_PACKAGE));
  machine.cores = count_of(topology, HWLOC_OBJ_CORE);
  machine.hardware_threads = count_of(topology, HWLOC_OBJ_PU);
  machine.l2_bytes = cache_bytes(topology, HWLOC_OBJ_L2CACHE);
  machine.l3_bytes = cache_bytes(topology, HWLOC_OBJ_L3CACHE);
  machine.l3_domains = count_of(topology, HWLOC_OBJ_L3CACHE);
  machine.memory_bytes = usable_memory_bytes(topology);
  machine.is_this_system = hwloc_topology_is_thissystem(topology.get());
  machine.numa_nodes = read_numa_nodes(topology);
  machine.core_list = read_cores(topology, machine.numa_nodes);
  machine.drives = read_drives(topology);
  machine.gpus = read_gpus(topology);
  return machine;
}

}  // namespace

Machine read_machine(const fs::path& xml) { return describe(load_topology(xml)); }

void save_topology(const fs::path& to, const fs::path& from) {
  const Topology topology = load_topology(from);
  const Machine machine = describe(topology);
  const auto annotate = [](hwloc_obj_t object, const char* name, const std::string& value) {
    if (object && attribute(object, name).empty()) {
      hwloc_obj_add_info(object, name, value.c_str());
    }
  };
  annotate(hwloc_get_root_obj(topology.get()), kMemoryBytes, std::to_string(machine.memory_bytes));
  hwloc_obj_t device = nullptr;
  while ((device = hwloc_get_next_osdev(topology.get(), device))) {
    const auto drive = std::ranges::find(machine.drives, device->name, &Drive::name);
    if (drive != machine.drives.end() && drive->rotational) annotate(device, kRotational, "1");
  }
  export_topology(topology, to);
}

uint32_t node_distance(const Machine& machine, uint32_t from, uint32_t to) {
  constexpr uint32_t kLocal = 10, kRemote = 20;  // Linux's, of a machine that does not say
  const auto& nodes = machine.numa_nodes;
  const auto row = std::ranges::find(nodes, from, &NumaNode::index);
  const auto column = std::ranges::find(nodes, to, &NumaNode::index) - nodes.begin();
  const bool known = row != nodes.end() && static_cast<size_t>(column) < row->distances.size();
  if (!known) return from == to ? kLocal : kRemote;
  return row->distances[static_cast<size_t>(column)];
}

std::vector<uint32_t> cpus_of_node(const Machine& machine, uint32_t node) {
  std::vector<uint32_t> cpus;
  if (!machine.is_this_system) return cpus;
  for (const Core& core : machine.core_list) {
    if (core.numa_node == node) cpus.insert(cpus.end(), core.cpus.begin(), core.cpus.end());
  }
  return cpus;
}

uint64_t container_memory_bytes() {
  const std::string v2 = sys_text("/sys/fs/cgroup/memory.max");
  const std::string text =
      v2.empty() ? sys_text("/sys/fs/cgroup/memory/memory.limit_in_bytes") : v2;
  return parse_number<uint64_t>(text).value_or(UINT64_MAX);
}

uint64_t memlock_limit_bytes() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
    fail(ErrorCode::io, "getrlimit(RLIMIT_MEMLOCK): {}", errno_text(errno));
  }
  return limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur;
}

}  // namespace overspill
