// hwloc tells that a file is bad, not why: the beginning of the file does.
#include "offload/topology_xml.h"

#include <hwloc.h>

#include <cerrno>
#include <cstdlib>
#include <string>

#include "engine/base/error.h"
#include "engine/base/fd.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

void check_hwloc(bool ok, const char* action) {
  if (ok) return;
  fail(ErrorCode::io,
       "read the machine's topology: {}: {}; check that /sys is mounted and readable", action,
       errno_text(errno));
}

/// The version attribute of the file's <topology> element; empty: hwloc 1 wrote none.
std::string version_of(const std::string& text, size_t element) {
  const size_t end = text.find('>', element);
  const size_t attribute = text.find("version=\"", element);
  if (attribute > end) return "";
  const size_t begin = attribute + 9;
  return text.substr(begin, text.find('"', begin) - begin);
}

std::string why_refused(const fs::path& xml) {
  const std::string text = read_text_file(xml);
  const size_t element = text.find("<topology");
  if (element == std::string::npos) return "this is not an XML file of hwloc";
  const std::string version = version_of(text, element);
  if (!version.empty() && !version.starts_with("1.") && !version.starts_with("2.")) {
    return fmt::format("it has hwloc's XML version {}, and versions 1 and 2 can be read", version);
  }
  return "the XML is cut short or damaged";
}

[[noreturn]] void refuse(const fs::path& xml, bool from_environment) {
  const char* const remedy = from_environment ? "unset HWLOC_XMLFILE, or name" : "name";
  if (!fs::exists(xml)) {
    fail(ErrorCode::not_found,
         "topology {}: there is no such file; {} one that `overspill topology --save` or `lstopo` "
         "wrote",
         xml.string(), remedy);
  }
  if (!fs::is_regular_file(xml)) {
    fail(ErrorCode::invalid_file, "topology {}: this is not a file; {} one", xml.string(), remedy);
  }
  fail(ErrorCode::invalid_file,
       "topology {}: {}; {} a file that `overspill topology --save` or `lstopo` of hwloc 2 wrote",
       xml.string(), why_refused(xml), remedy);
}

}  // namespace

void TopologyDeleter::operator()(hwloc_topology* topology) const {
  hwloc_topology_destroy(topology);
}

Topology load_topology(const fs::path& xml) {
  hwloc_topology_t raw = nullptr;
  check_hwloc(hwloc_topology_init(&raw) == 0, "hwloc_topology_init");
  Topology topology(raw);
  // hwloc itself falls back to this machine when the variable names a bad file; that would mislead.
  const char* const variable = std::getenv("HWLOC_XMLFILE");
  const bool from_environment = xml.empty() && variable && *variable;
  const fs::path file = from_environment ? fs::path(variable) : xml;
  if (!file.empty() && hwloc_topology_set_xml(raw, file.c_str()) != 0) {
    refuse(file, from_environment);
  }
  check_hwloc(hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT) == 0,
              "hwloc_topology_set_io_types_filter");
  const bool loaded = hwloc_topology_load(raw) == 0;
  if (!loaded && !file.empty()) refuse(file, from_environment);
  check_hwloc(loaded, "hwloc_topology_load");
  return topology;
}

void export_topology(const Topology& topology, const fs::path& xml) {
  char* text = nullptr;
  int bytes = 0;
  if (hwloc_topology_export_xmlbuffer(topology.get(), &text, &bytes, 0) != 0) {
    fail(ErrorCode::io, "topology {}: hwloc cannot describe the machine: {}", xml.string(),
         errno_text(errno));
  }
  const std::string copy(text);
  hwloc_free_xmlbuffer(topology.get(), text);
  write_text_file(xml, copy);
}

}  // namespace overspill
