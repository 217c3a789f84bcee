// Compute rates as tables, a plot per op, JSON, and the profile's points.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "engine/bench/compute_benchmark.h"
#include "engine/bench/svg_plot.h"

namespace overspill {
namespace {

using Json = nlohmann::ordered_json;

struct OpTitle {
  OpKind op;
  const char *name, *title;
};
constexpr OpTitle kOps[] = {{OpKind::forward, "forward", "Block, forward"},
                            {OpKind::backward, "backward", "Block, backward with recomputation"},
                            {OpKind::loss, "loss", "Head and loss, forward and backward"}};

const LayerRate* find(const ComputeReport& report, OpKind op, uint32_t hidden, double tokens) {
  const auto found = std::ranges::find_if(report.layers, [&](const LayerRate& layer) {
    return layer.point.op == op && layer.hidden == hidden && layer.point.tokens == tokens;
  });
  return found == report.layers.end() ? nullptr : &*found;
}

/// Sizes and micro-batches that were measured, ascending.
struct Grid {
  std::set<uint32_t> hidden;
  std::set<double> tokens;
  explicit Grid(const ComputeReport& report) {
    for (const LayerRate& layer : report.layers) {
      hidden.insert(layer.hidden);
      tokens.insert(layer.point.tokens);
    }
  }
};

std::string op_plot(const ComputeReport& report, const Grid& grid, const OpTitle& op) {
  LinePlot plot{.title = op.title,
                .x_title = "tokens of a micro-batch (a line per hidden size)",
                .y_title = "GFLOP/s",
                .x_ticks = {},
                .lines = {}};
  for (const double tokens : grid.tokens) {
    plot.x_ticks.emplace_back(tokens, fmt::format("{}", tokens));
  }
  for (const uint32_t hidden : grid.hidden) {
    PlotLine line{.name = fmt::format("{}", hidden), .colour = plot.lines.size(), .points = {}};
    for (const double tokens : grid.tokens) {
      const LayerRate* const layer = find(report, op.op, hidden, tokens);
      if (layer != nullptr) line.points.emplace_back(tokens, layer->point.flops_per_second * 1e-9);
    }
    plot.lines.push_back(std::move(line));
  }
  return draw(plot);
}

BenchTable layers_table(const ComputeReport& report, const Grid& grid) {
  BenchTable table{
      .title = fmt::format("layers of bf16 weights, vocabulary {}, {} threads, GFLOP/s",
                           report.vocabulary, report.threads),
      .columns = {"hidden", "tokens", "forward", "backward", "loss"},
      .rows = {}};
  for (const uint32_t hidden : grid.hidden) {
    for (const double tokens : grid.tokens) {
      std::vector<std::string> row = {fmt::format("{}", hidden), fmt::format("{}", tokens)};
      for (const OpTitle& op : kOps) {
        const LayerRate* const layer = find(report, op.op, hidden, tokens);
        row.push_back(layer == nullptr ? "" : giga(layer->point.flops_per_second));
      }
      table.rows.push_back(std::move(row));
    }
  }
  return table;
}

BenchTable products_table(const ComputeReport& report) {
  BenchTable table{.title = "products of bf16 weights with float32 activations",
                   .columns = {"projection", "tokens", "out", "in", "GFLOP/s"},
                   .rows = {}};
  for (const ProductRate& product : report.products) {
    const GemmPoint& p = product.point;
    table.rows.push_back({product.name, fmt::format("{}", p.m), fmt::format("{}", p.n),
                          fmt::format("{}", p.k), giga(p.flops_per_second)});
  }
  return table;
}

}  // namespace

BenchSection compute_section(const ComputeReport& report) {
  const Grid grid(report);
  Json layers = Json::array(), products = Json::array();
  for (const LayerRate& layer : report.layers) {
    const auto op = std::ranges::find(kOps, layer.point.op, &OpTitle::op);
    layers.push_back({{"op", op->name},
                      {"hidden", layer.hidden},
                      {"parameters", layer.point.parameters},
                      {"tokens", layer.point.tokens},
                      {"flops_per_second", layer.point.flops_per_second}});
  }
  for (const ProductRate& product : report.products) {
    products.push_back({{"name", product.name},
                        {"m", product.point.m},
                        {"n", product.point.n},
                        {"k", product.point.k},
                        {"flops_per_second", product.point.flops_per_second}});
  }
  std::vector<std::string> plots;
  for (const OpTitle& op : kOps) plots.push_back(op_plot(report, grid, op));
  const BenchTable tables[] = {layers_table(report, grid), products_table(report)};
  const std::string note = fmt::format("fastest: {} GFLOP/s", giga(report.peak_flops()));
  return make_section("compute", "Compute", tables, plots, {&note, 1},
                      {{"threads", report.threads},
                       {"vocabulary", report.vocabulary},
                       {"peak_flops_per_second", report.peak_flops()},
                       {"layers", layers},
                       {"products", products}});
}

void fill_profile(const ComputeReport& report, HardwareProfile& profile) {
  DeviceProfile& device = profile.device;
  device.accelerator = false;
  device.peak_flops = report.peak_flops();
  device.compute.clear();
  device.gemm.clear();
  for (const LayerRate& layer : report.layers) device.compute.push_back(layer.point);
  for (const ProductRate& product : report.products) device.gemm.push_back(product.point);
}

}  // namespace overspill
