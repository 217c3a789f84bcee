// The report as text and JSON.
#include "engine/bench/nvme_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/base/units.h"

namespace overspill {
namespace {

using Json = nlohmann::ordered_json;

const BenchRates* find_rates(const TargetResult& target, const BenchPoint& point) {
  const auto found = std::ranges::find(target.results, point, &BenchResult::point);
  return found == target.results.end() ? nullptr : &found->rates;
}

std::string cell(double rate, bool best) {
  return rate > 0 ? fmt::format("{:>9.2f}{}", rate * 1e-9, best ? '*' : ' ')
                  : fmt::format("{:>9} ", "-");
}

/// One row: reads and writes of one block size and depth, in both orders.
std::string alone_row(const TargetResult& target, uint64_t block, uint32_t depth) {
  std::string row = fmt::format("  {:>10} {:>6}", format_bytes(block), depth);
  const Recommendation& best = target.best;
  double cpu = 0;
  bool any = false;
  for (const Traffic traffic : {Traffic::read, Traffic::write}) {
    const bool reads = traffic == Traffic::read;
    const uint32_t chosen = reads ? best.read_depth : best.write_depth;
    for (const PageOrder order : {PageOrder::sequential, PageOrder::random}) {
      const BenchRates* const rates =
          find_rates(target, {traffic, order, block, reads ? depth : 0, reads ? 0 : depth});
      const bool marked =
          order == PageOrder::random && block == best.block_bytes && depth == chosen;
      row += cell(rates == nullptr ? 0 : reads ? rates->read : rates->write, marked);
      if (rates == nullptr) continue;
      any = true;
      cpu = std::max(cpu, rates->cpu_seconds_per_gb);
    }
  }
  return any ? row + fmt::format("{:>9.3f}\n", cpu) : "";
}

std::string alone_table(const TargetResult& target) {
  std::set<uint64_t> blocks;
  std::set<uint32_t> depths;
  for (const BenchResult& result : target.results) {
    if (result.point.traffic == Traffic::mixed) continue;
    blocks.insert(result.point.block_bytes);
    depths.insert(std::max(result.point.read_depth, result.point.write_depth));
  }
  std::string text =
      "                         read GB/s           write GB/s       most CPU\n"
      "  block size  depth    file    random     file    random      s/GB\n";
  for (const uint64_t block : blocks) {
    for (const uint32_t depth : depths) text += alone_row(target, block, depth);
  }
  return text;
}

std::string mixed_table(const TargetResult& target) {
  std::string text = fmt::format(
      "\n  both at once, {} blocks in random order\n"
      "  read depth  write depth  read GB/s  write GB/s  CPU s/GB\n",
      format_bytes(target.best.block_bytes));
  for (const BenchResult& result : target.results) {
    const BenchPoint& point = result.point;
    if (point.traffic != Traffic::mixed) continue;
    const bool best = point.read_depth == target.best.mixed_read_depth &&
                      point.write_depth == target.best.mixed_write_depth;
    text += fmt::format("  {:>10} {:>12} {:>10.2f} {:>11.2f}{}{:>9.3f}\n", point.read_depth,
                        point.write_depth, result.rates.read * 1e-9, result.rates.write * 1e-9,
                        best ? '*' : ' ', result.rates.cpu_seconds_per_gb);
  }
  return text;
}

std::string node_table(const TargetResult& target) {
  std::string text;
  for (const NodeResult& node : target.nodes) {
    const char* where = !node.local ? "" : *node.local ? " (the drive's)" : " (remote)";
    text += fmt::format("  NUMA node {}{}: read {}, write {}\n", node.node, where,
                        format_rate(node.read), format_rate(node.write));
  }
  return text.empty() ? "" : "\n" + text;
}

std::string target_text(const TargetResult& target) {
  const Recommendation& best = target.best;
  std::string text = fmt::format("\n{}: {} by {}{}, first write to new blocks {}\n", target.name,
                                 format_bytes(target.bytes), target.backend,
                                 target.direct ? ", O_DIRECT" : ", without O_DIRECT",
                                 format_rate(target.first_write_rate));
  text += alone_table(target) + mixed_table(target) + node_table(target);
  text += fmt::format("\n  use {}\n", describe_recommendation(best));
  text += fmt::format("  alone: read {}, write {}; together: read {}, write {}{}\n",
                      format_rate(best.read), format_rate(best.write), format_rate(best.mixed_read),
                      format_rate(best.mixed_write),
                      best.reads_keep_half ? "" : " (no depths let reads keep half their rate)");
  return text;
}

// ---- JSON ----

Json result_json(const BenchResult& result) {
  const BenchPoint& point = result.point;
  return {{"traffic", traffic_name(point.traffic)},
          {"order", order_name(point.order)},
          {"block_size", point.block_bytes},
          {"read_depth", point.read_depth},
          {"write_depth", point.write_depth},
          {"read_bytes_per_second", result.rates.read},
          {"write_bytes_per_second", result.rates.write},
          {"cpu_seconds_per_gb", result.rates.cpu_seconds_per_gb}};
}

Json recommendation_json(const Recommendation& best) {
  return {{"block_size", best.block_bytes},
          {"read_depth", best.mixed_read_depth},
          {"write_depth", best.mixed_write_depth},
          {"reads_keep_half", best.reads_keep_half},
          {"read_bytes_per_second", best.mixed_read},
          {"write_bytes_per_second", best.mixed_write},
          {"alone",
           {{"read_depth", best.read_depth},
            {"write_depth", best.write_depth},
            {"read_bytes_per_second", best.read},
            {"write_bytes_per_second", best.write}}}};
}

Json target_json(const TargetResult& target) {
  Json paths = Json::array(), results = Json::array(), nodes = Json::array();
  for (const auto& path : target.paths) paths.push_back(path.string());
  for (const BenchResult& result : target.results) results.push_back(result_json(result));
  for (const NodeResult& node : target.nodes) {
    nodes.push_back({{"node", node.node},
                     {"local", node.local ? Json(*node.local) : Json()},
                     {"read_bytes_per_second", node.read},
                     {"write_bytes_per_second", node.write}});
  }
  return {{"name", target.name},
          {"paths", paths},
          {"bytes", target.bytes},
          {"backend", target.backend},
          {"direct", target.direct},
          {"first_write_bytes_per_second", target.first_write_rate},
          {"recommended", recommendation_json(target.best)},
          {"numa_nodes", nodes},
          {"results", results}};
}

}  // namespace

std::string describe_recommendation(const Recommendation& best) {
  return fmt::format("block size {}, queue depth {} for reads and {} for writes, per drive",
                     format_bytes(best.block_bytes), best.mixed_read_depth, best.mixed_write_depth);
}

std::string bench_text(const NvmeBenchReport& report) {
  std::string text =
      fmt::format("pages of {} in requests of the block size; * marks what is recommended\n",
                  format_bytes(report.page_bytes));
  for (const TargetResult& target : report.targets) text += target_text(target);
  if (!report.notes.empty()) text += "\n";
  for (const std::string& note : report.notes) text += fmt::format("note: {}\n", note);
  return text;
}

std::string bench_json(const NvmeBenchReport& report) {
  Json targets = Json::array();
  for (const TargetResult& target : report.targets) targets.push_back(target_json(target));
  const Json json = {{"machine", report.machine},
                     {"kernel", report.kernel},
                     {"started", report.started},
                     {"page_bytes", report.page_bytes},
                     {"seconds_per_point", report.seconds_per_point},
                     {"targets", targets},
                     {"notes", report.notes}};
  // A path may hold bytes that are not UTF-8; replace them rather than throw.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace overspill
