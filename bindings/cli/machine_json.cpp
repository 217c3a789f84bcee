// Plain translation, field by field.
#include "bindings/cli/machine_json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace overspill {
namespace {

using Json = nlohmann::ordered_json;

Json node_json(int numa_node) { return numa_node < 0 ? Json() : Json(numa_node); }
Json text_json(const std::string& text) { return text.empty() ? Json() : Json(text); }

}  // namespace

Json machine_json(const Machine& machine) {
  Json nodes = Json::array(), drives = Json::array(), gpus = Json::array();
  for (const NumaNode& node : machine.numa_nodes) {
    nodes.push_back({{"index", node.index},
                     {"memory_bytes", node.memory_bytes},
                     {"cpus", node.cpus},
                     {"distances", node.distances.empty() ? Json() : Json(node.distances)}});
  }
  for (const Drive& drive : machine.drives) {
    drives.push_back({{"name", drive.name},
                      {"model", text_json(drive.model)},
                      {"size_bytes", drive.size_bytes == 0 ? Json() : Json(drive.size_bytes)},
                      {"numa_node", node_json(drive.numa_node)},
                      {"rotational", drive.rotational}});
  }
  for (const Gpu& gpu : machine.gpus) {
    gpus.push_back({{"name", gpu.name}, {"pci", gpu.pci}, {"numa_node", node_json(gpu.numa_node)}});
  }
  return {{"cpu_model", text_json(machine.cpu_model)},
          {"packages", machine.packages},
          {"cores", machine.cores},
          {"hardware_threads", machine.hardware_threads},
          {"l2_bytes", machine.l2_bytes},
          {"l3_bytes", machine.l3_bytes},
          {"l3_domains", machine.l3_domains},
          {"memory_bytes", machine.memory_bytes},
          {"numa_nodes", nodes},
          {"drives", drives},
          {"gpus", gpus}};
}

void print_json(const Json& json) {
  fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace overspill
