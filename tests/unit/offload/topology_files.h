// Descriptions of hosts for tests: the files of real ones, and a two-socket EPYC 9005 that none of
// them is.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace overspill::test {

/// A real host's file, in the folder of test data; may be absent.
inline std::filesystem::path topology_file(const std::string& name) {
  const char* const root = std::getenv("OVERSPILL_TEST_DATA");
  return std::filesystem::path(root ? root : OVERSPILL_SOURCE_DIR "/../shared/data") /
         "topologies" / name;
}

/// A path in the temporary directory; its file, if any, is removed in the end.
class TemporaryPath {
 public:
  explicit TemporaryPath(const std::string& name)
      : path_(std::filesystem::temp_directory_path() /
              fmt::format("overspill-{}-{}", ::getpid(), name)) {}
  ~TemporaryPath() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryPath(const TemporaryPath&) = delete;
  TemporaryPath& operator=(const TemporaryPath&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string string() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

/// hwloc's XML of two EPYC 9575F in NPS1: per socket 64 cores with SMT in 8 L3 domains of 8, 768
/// GiB on one NUMA node, 2 GPUs and 4 NVMe drives. Numbered as Linux does: cores 0-127, then
/// siblings. `gpus_on_first` moves so many of the four GPUs to the first socket.
class Epyc9005Xml {
 public:
  explicit Epyc9005Xml(unsigned gpus_on_first = 2) : gpus_on_first_(gpus_on_first) {
    xml_ =
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n"
        "<topology version=\"2.0\">\n";
    open("Machine", 0, 0, 128, 3,
         fmt::format(" allowed_cpuset=\"{}\" allowed_nodeset=\"0x3\"", cpuset(0, 128)));
    for (unsigned socket = 0; socket < 2; ++socket) add_socket(socket);
    close();
    xml_ +=
        "<distances2 type=\"NUMANode\" nbobjs=\"2\" kind=\"5\" name=\"NUMALatency\" "
        "indexing=\"os\"><indexes length=\"4\">0 1 </indexes><u64values length=\"12\">"
        "10 32 32 10 </u64values></distances2>\n</topology>\n";
  }

  const std::string& text() const { return xml_; }

 private:
  static constexpr unsigned kCores = 128, kSocketCores = 64, kDomainCores = 8;

  /// Cores [begin, end) and their siblings in hwloc's notation, the highest 32 bits first.
  static std::string cpuset(unsigned begin, unsigned end, bool siblings = true) {
    std::string text;
    for (int word = 7; word >= 0; --word) {
      uint32_t bits = 0;
      for (unsigned bit = 0; bit < 32; ++bit) {
        const unsigned cpu = static_cast<unsigned>(word) * 32 + bit;
        const unsigned core = siblings ? cpu % kCores : cpu;
        if (core >= begin && core < end) bits |= 1u << bit;
      }
      text += fmt::format("{}0x{:08x}", text.empty() ? "" : ",", bits);
    }
    return text;
  }

  void element(const char* type, unsigned os_index, const std::string& cpus, unsigned nodes,
               const std::string& more) {
    xml_ += fmt::format(
        "<object type=\"{}\" os_index=\"{}\" gp_index=\"{}\" cpuset=\"{}\" complete_cpuset=\"{}\" "
        "nodeset=\"0x{:x}\" complete_nodeset=\"0x{:x}\"{}",
        type, os_index, ++objects_, cpus, cpus, nodes, nodes, more);
  }
  void open(const char* type, unsigned os_index, unsigned begin, unsigned end, unsigned nodes,
            const std::string& more = "") {
    element(type, os_index, cpuset(begin, end), nodes, more + ">\n");
  }
  void close() { xml_ += "</object>\n"; }
  void attribute(const char* name, const std::string& value) {
    xml_ += fmt::format("<info name=\"{}\" value=\"{}\"/>\n", name, value);
  }

  void add_socket(unsigned socket) {
    const unsigned first = socket * kSocketCores, last = first + kSocketCores, node = 1u << socket;
    open("Package", socket, first, last, node);
    attribute("CPUModel", "AMD EPYC 9575F 64-Core Processor");
    open("NUMANode", socket, first, last, node,
         fmt::format(" local_memory=\"{}\"", uint64_t{768} << 30));
    close();
    for (unsigned begin = first; begin < last; begin += kDomainCores) {
      add_cache("L3Cache", 3, 32u << 20, begin, begin + kDomainCores, node);
      for (unsigned core = begin; core < begin + kDomainCores; ++core) add_core(core, node);
      close();
    }
    for (unsigned i = 0; i < 4; ++i) {
      if ((i < gpus_on_first_) == (socket == 0)) add_gpu(socket, i);
      add_drive(socket, i);
    }
    close();
  }

  void add_cache(const char* type, unsigned depth, unsigned bytes, unsigned begin, unsigned end,
                 unsigned node) {
    open(type, begin, begin, end, node,
         fmt::format(" cache_size=\"{}\" depth=\"{}\" cache_linesize=\"64\" "
                     "cache_associativity=\"16\" cache_type=\"0\"",
                     bytes, depth));
  }

  void add_core(unsigned core, unsigned node) {
    add_cache("L2Cache", 2, 1u << 20, core, core + 1, node);
    open("Core", core, core, core + 1, node);
    for (const unsigned cpu : {core, core + kCores}) {
      element("PU", cpu, cpuset(cpu, cpu + 1, false), node, "/>\n");
    }
    close();
    close();
  }

  /// A root complex with one device behind it, which the caller describes and closes twice.
  void open_device(unsigned bus, const char* ids) {
    xml_ += fmt::format(
        "<object type=\"Bridge\" gp_index=\"{}\" bridge_type=\"0-1\" depth=\"0\" "
        "bridge_pci=\"0000:[{:02x}-{:02x}]\">\n<object type=\"PCIDev\" gp_index=\"{}\" "
        "pci_busid=\"0000:{:02x}:00.0\" pci_type=\"{}\" pci_link_speed=\"63.015385\">\n",
        objects_ + 1, bus, bus, objects_ + 2, bus, ids);
    objects_ += 2;
  }

  void add_gpu(unsigned socket, unsigned i) {
    open_device(0x80 * socket + 0x01 + 0x10 * i, "0300 [10de:2bb1] [10de:204b] a1");
    attribute("PCIVendor", "NVIDIA Corporation");
    attribute("PCIDevice", "GB202GL [RTX PRO 6000 Blackwell Workstation Edition]");
    close();
    close();
  }

  void add_drive(unsigned socket, unsigned i) {
    open_device(0x80 * socket + 0x41 + i, "0108 [144d:a826] [144d:aa0a] 00");
    xml_ +=
        fmt::format("<object type=\"OSDev\" gp_index=\"{}\" name=\"nvme{}n1\" osdev_type=\"0\">\n",
                    ++objects_, 4 * socket + i);
    attribute("Size", "3750738264");  // in KiB
    attribute("Model", "SAMSUNG MZWLO3T8HCLS-00A07");
    close();
    close();
    close();
  }

  const unsigned gpus_on_first_;
  unsigned objects_ = 0;
  std::string xml_;
};

}  // namespace overspill::test
