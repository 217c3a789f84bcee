// Reports of the benchmarks in memory: tables, JSON, pages, and what they fill in of a profile.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "engine/bench/bench_profile.h"
#include "engine/bench/bench_section.h"
#include "engine/bench/compute_benchmark.h"
#include "engine/bench/contention_benchmark.h"
#include "engine/bench/copy_benchmark.h"
#include "engine/bench/optimizer_benchmark.h"
#include "engine/plan/profile_file.h"

namespace overspill {
namespace {

CopyReport two_devices() {
  CopyReport report;
  report.typical_bytes = 16 * kMiB;
  report.memory_bandwidth = 60e9;
  report.memory_bytes = 64 * kGiB;
  report.cores = 8;
  report.numa_distances = {{10, 21}, {21, 10}};
  report.all_h2d = 30e9;
  report.all_d2h = 28e9;
  for (const double speed : {1.0, 0.5}) {
    DeviceCopies& device = report.devices.emplace_back();
    device.name = speed == 1 ? "fast & near" : "slow";
    device.latency = 1e-6 / speed;
    for (const uint64_t bytes : {kMiB, 16 * kMiB, 64 * kMiB}) {
      for (const bool pinned : {true, false}) {
        const double rate = speed * (static_cast<double>(bytes / kMiB) + (pinned ? 1e9 : 0));
        device.points.push_back({bytes, pinned, 20 * rate, 18 * rate, 12 * rate, 11 * rate});
      }
    }
    device.nodes = {{0, 20e9, 18e9}, {1, 10e9, 9e9}};
  }
  return report;
}

OptimizerReport updates() {
  OptimizerReport report{.chunk_parameters = 4 << 20, .threads = 4, .updates = {}, .scaling = {}};
  report.updates = {{OptimizerKind::adamw, StateFormat::float32, 2e9},
                    {OptimizerKind::lion, StateFormat::int8, 5e9}};
  report.update_latency = 3e-6;
  report.reduce_gradient = 7e9;
  report.export_gradient = 6e9;
  report.scaling = {{1, 1e9}, {2, 1.8e9}, {4, 2e9}};
  return report;
}

ComputeReport layers() {
  ComputeReport report{.threads = 2, .vocabulary = 512, .layers = {}, .products = {}};
  for (const uint32_t hidden : {256u, 512u}) {
    for (const double tokens : {16.0, 64.0}) {
      for (const OpKind op : {OpKind::forward, OpKind::backward, OpKind::loss}) {
        report.layers.push_back({hidden, {op, 1e3 * hidden, tokens, 1e9 * tokens}});
      }
    }
  }
  report.products = {{"gate", {.m = 64, .n = 768, .k = 256, .flops_per_second = 9e10}}};
  return report;
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(BenchTables, AlignTheirColumns) {
  const BenchTable table{.title = "a title",
                         .columns = {"name", "rate"},
                         .rows = {{"long name", "1.5"}, {"x", "12.25"}}};
  EXPECT_EQ(table_text(table),
            "a title\n"
            "  name        rate\n"
            "  long name    1.5\n"
            "  x          12.25\n");
  EXPECT_EQ(count(table_html(table), "<tr>"), 3u);
}

TEST(BenchReports, SayTheSameInAllForms) {
  const std::vector<BenchSection> sections = {
      copy_section(two_devices()), optimizer_section(updates()), compute_section(layers()),
      contention_section({{{"forward", "update", 0.7, 0.4}}})};
  const BenchHost host{.machine = "a <cpu>", .kernel = "Linux", .started = "today"};
  const auto json = nlohmann::json::parse(sections_json(host, sections));
  EXPECT_EQ(json.at("machine"), "a <cpu>");
  EXPECT_EQ(json.at("copy").at("devices").at(1).at("results").size(), 6u);
  EXPECT_EQ(json.at("copy").at("numa_distances").at(0).at(1), 21);
  EXPECT_EQ(json.at("optimizer").at("updates").at(1).at("state"), "int8");
  EXPECT_EQ(json.at("optimizer").at("updates").at(1).at("parameters_per_second"), 5e9);
  EXPECT_EQ(json.at("compute").at("layers").size(), 12u);
  EXPECT_EQ(json.at("compute").at("peak_flops_per_second"), 9e10);
  EXPECT_EQ(json.at("contention").at("pairs").at(0).at("second_part"), 0.4);

  const std::string html = sections_html(host, sections);
  EXPECT_TRUE(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"));
  EXPECT_EQ(count(html, "<h2>"), sections.size());
  EXPECT_EQ(count(html, "<svg "), 2u + 2u + 3u);
  for (const char* outside : {"http:", "https:", "<script", "<link", "<img", "url(", "nan"}) {
    EXPECT_EQ(html.find(outside), std::string::npos) << outside;
  }
  for (const char* tag : {"svg", "table", "div", "p", "h2", "text", "tr", "td", "th"}) {
    const std::string open = std::string("<") + tag;
    EXPECT_EQ(count(html, open + ">") + count(html, open + " "),
              count(html, std::string("</") + tag + ">"))
        << tag;
  }
  EXPECT_NE(html.find("fast &amp; near"), std::string::npos);
  EXPECT_NE(sections[1].text.find("lion, int8 state"), std::string::npos) << sections[1].text;
  EXPECT_NE(sections[3].text.find("1.10"), std::string::npos) << sections[3].text;
}

TEST(BenchProfiles, TakeTheSlowestDeviceAtTheTypicalSize) {
  HardwareProfile profile;
  fill_profile(two_devices(), profile);
  EXPECT_DOUBLE_EQ(profile.link.h2d, 0.5 * 20 * (1e9 + 16));
  EXPECT_DOUBLE_EQ(profile.link.both_d2h, 0.5 * 11 * (1e9 + 16));
  EXPECT_DOUBLE_EQ(profile.link.latency, 2e-6);
  EXPECT_EQ(profile.link.all_h2d, 30e9);
  EXPECT_EQ(profile.device.count, 2u);
  EXPECT_EQ(profile.host.memory_bandwidth, 60e9);
  EXPECT_EQ(profile.host.cores, 8u);
  EXPECT_EQ(profile.host.numa_distances.size(), 2u);
}

TEST(BenchProfiles, EachReplacesOnlyWhatItMeasured) {
  HardwareProfile before;
  before.drives.read = 9e9;
  before.collective.all_gather = 3e9;
  before.host.updates = {{OptimizerKind::sgd, StateFormat::float32, 1e9}};
  before.device.compute = {{OpKind::forward, 1, 1, 1}};
  HardwareProfile profile = before;
  fill_profile(two_devices(), profile);
  EXPECT_EQ(profile.host.updates, before.host.updates);
  fill_profile(updates(), profile);
  EXPECT_EQ(profile.host.updates, updates().updates);
  EXPECT_EQ(profile.host.memory_bandwidth, 60e9);
  EXPECT_EQ(profile.device.reduce_gradient, 7e9);
  EXPECT_EQ(profile.device.compute, before.device.compute);
  fill_profile(layers(), profile);
  EXPECT_EQ(profile.device.compute.size(), 12u);
  EXPECT_EQ(profile.device.gemm.size(), 1u);
  EXPECT_EQ(profile.device.peak_flops, 9e10);
  EXPECT_EQ(profile.device.reduce_gradient, 7e9);
  EXPECT_EQ(profile.drives, before.drives);
  EXPECT_EQ(profile.collective, before.collective);
}

TEST(BenchProfiles, NoteWhoMeasuredWhatAndWhen) {
  HardwareProfile profile;
  const Machine machine;
  sign_profile("copy", {.machine = "cpu", .kernel = "", .started = "monday"}, machine, {}, profile);
  sign_profile("nvme", {.machine = "cpu", .kernel = "", .started = "monday"}, machine, {}, profile);
  sign_profile("copy", {.machine = "other", .kernel = "", .started = "friday"}, machine, {},
               profile);
  EXPECT_EQ(profile.name, "cpu");
  EXPECT_EQ(profile.sources, (std::vector<std::string>{"nvme: `overspill bench nvme` at monday",
                                                       "copy: `overspill bench copy` at friday"}));
}

TEST(BenchProfiles, SummaryListsDrivesOnlyWhereTheyWereMeasured) {
  HardwareProfile profile;
  fill_profile(updates(), profile);
  EXPECT_EQ(table_text(profile_summary(profile)).find("drives"), std::string::npos);
  profile.drives.settings = {kMiB, 4, 4};
  const std::string text = table_text(profile_summary(profile));
  EXPECT_NE(text.find("drives: read"), std::string::npos);
  EXPECT_NE(text.find("adamw, float32 state"), std::string::npos);
}

TEST(NumaDistances, AreReadOfEveryNodeOrNotAtAll) {
  std::string name = std::filesystem::temp_directory_path() / "overspill-distances-XXXXXX";
  ASSERT_NE(mkdtemp(name.data()), nullptr);
  const std::filesystem::path root = name;
  Machine machine;
  machine.numa_nodes = {{.index = 0, .memory_bytes = 0, .cpus = ""},
                        {.index = 2, .memory_bytes = 0, .cpus = ""}};
  for (const auto& [node, row] : {std::pair{"node0", "10 32\n"}, std::pair{"node2", "32 10\n"}}) {
    EXPECT_TRUE(read_numa_distances(machine, root).empty());
    std::filesystem::create_directory(root / node);
    std::ofstream(root / node / "distance") << row;
  }
  EXPECT_EQ(read_numa_distances(machine, root),
            (std::vector<std::vector<uint32_t>>{{10, 32}, {32, 10}}));
  machine.numa_nodes.pop_back();
  EXPECT_TRUE(read_numa_distances(machine, root).empty()) << "one node has no distances";
  std::filesystem::remove_all(root);
}

TEST(ThreadCounts, DoubleUpToAll) {
  EXPECT_EQ(thread_counts(1), (std::vector<uint32_t>{1}));
  EXPECT_EQ(thread_counts(2), (std::vector<uint32_t>{1, 2}));
  EXPECT_EQ(thread_counts(6), (std::vector<uint32_t>{1, 2, 4, 6}));
}

TEST(BenchModel, HasTheShapesOfLlama) {
  const ModelShape model = bench_model(2048, 32000);
  EXPECT_EQ(model.config.intermediate_size, 5632u);  // as TinyLlama's 1.1 billion
  EXPECT_EQ(model.config.num_attention_heads, 32u);
  EXPECT_EQ(bench_model(256, 512).config.num_key_value_heads, 1u);
}

}  // namespace
}  // namespace overspill
