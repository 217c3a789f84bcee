// The report's three forms say the same numbers, and the page needs nothing from elsewhere.
#include "engine/bench/nvme_report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/base/units.h"
#include "engine/bench/svg_plot.h"

namespace overspill {
namespace {

NvmeBenchReport two_drives() {
  NvmeBenchReport report;
  report.machine = "a <processor> & more";
  report.kernel = "Linux 6.1";
  report.page_bytes = 48 * kMiB;
  report.seconds_per_point = 2;
  report.notes = {"a note"};
  for (const char* name : {"/mnt/a", "/mnt/b", "all 2 paths"}) {
    TargetResult target;
    target.name = name;
    target.paths = {name};
    if (target.name == "all 2 paths") target.paths = {"/mnt/a", "/mnt/b"};
    target.bytes = 4 * kGiB;
    target.backend = "io_uring";
    target.first_write_rate = 1.25e9;
    for (const uint64_t block : {kMiB, 4 * kMiB}) {
      for (const uint32_t depth : {1u, 4u}) {
        const double rate = 1e9 + 1e8 * depth + 100 * static_cast<double>(block);
        for (const PageOrder order : {PageOrder::random, PageOrder::sequential}) {
          target.results.push_back({{Traffic::read, order, block, depth, 0},
                                    {.read = rate, .cpu_seconds_per_gb = 0.01}});
          target.results.push_back({{Traffic::write, order, block, 0, depth}, {.write = 2 * rate}});
        }
      }
    }
    target.results.push_back(
        {{Traffic::mixed, PageOrder::random, 4 * kMiB, 4, 1}, {.read = 0.75e9, .write = 0.5e9}});
    target.best = recommend_alone(target.results);
    recommend_mixed(target.results, target.best);
    target.nodes = {{.node = 1, .local = false, .read = 1e9, .write = 2e9}};
    report.targets.push_back(target);
  }
  return report;
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(NvmeReport, JsonHoldsEveryResult) {
  const NvmeBenchReport report = two_drives();
  const nlohmann::json json = nlohmann::json::parse(bench_json(report));
  EXPECT_EQ(json.at("page_bytes"), 48 * kMiB);
  ASSERT_EQ(json.at("targets").size(), 3u);
  const nlohmann::json& target = json.at("targets")[2];
  EXPECT_EQ(target.at("paths").size(), 2u);
  EXPECT_EQ(target.at("first_write_bytes_per_second"), 1.25e9);
  ASSERT_EQ(target.at("results").size(), report.targets[2].results.size());
  for (size_t i = 0; i < target.at("results").size(); ++i) {
    const nlohmann::json& one = target.at("results")[i];
    const BenchResult& result = report.targets[2].results[i];
    EXPECT_EQ(one.at("traffic"), traffic_name(result.point.traffic));
    EXPECT_EQ(one.at("order"), order_name(result.point.order));
    EXPECT_EQ(one.at("block_size"), result.point.block_bytes);
    EXPECT_EQ(one.at("read_depth"), result.point.read_depth);
    EXPECT_EQ(one.at("write_depth"), result.point.write_depth);
    EXPECT_EQ(one.at("read_bytes_per_second"), result.rates.read);
    EXPECT_EQ(one.at("write_bytes_per_second"), result.rates.write);
  }
  const nlohmann::json& best = target.at("recommended");
  EXPECT_EQ(best.at("block_size"), report.targets[2].best.block_bytes);
  EXPECT_EQ(best.at("read_depth"), 4u);
  EXPECT_EQ(best.at("write_depth"), 1u);
}

TEST(NvmeReport, TableMarksWhatIsRecommended) {
  const std::string text = bench_text(two_drives());
  // Reads, writes and both at once, of three targets; and the sentence that explains the mark.
  EXPECT_EQ(count(text, "*"), 3u * 3u + 1u) << text;
  EXPECT_EQ(count(text, "use block size"), 3u);
  EXPECT_EQ(count(text, "NUMA node 1 (remote)"), 3u);
  EXPECT_NE(text.find("note: a note"), std::string::npos);
}

TEST(NvmeReport, PageIsWholeAndNeedsNothingElse) {
  const std::string html = bench_html(two_drives());
  EXPECT_TRUE(html.starts_with("<!doctype html>"));
  EXPECT_TRUE(html.ends_with("</body>\n</html>\n"));
  for (const char* outside : {"http:", "https:", "<script", "<link", "<img", "url(", "@import"}) {
    EXPECT_EQ(html.find(outside), std::string::npos) << outside;
  }
  // Three plots of each target, and three of all targets together.
  EXPECT_EQ(count(html, "<svg "), 12u);
  for (const char* tag : {"svg", "table", "div", "details", "p", "h2", "text", "tr", "td"}) {
    const std::string open = std::string("<") + tag;
    EXPECT_EQ(count(html, open + ">") + count(html, open + " "),
              count(html, std::string("</") + tag + ">"))
        << tag;
  }
  EXPECT_NE(html.find("a &lt;processor&gt; &amp; more"), std::string::npos);
  EXPECT_EQ(html.find("nan"), std::string::npos);
}

TEST(SvgPlot, DrawsPointsInsideItsFrame) {
  LinePlot plot;
  plot.x_ticks = {{1, "1"}, {16, "16"}};
  plot.lines = {{.name = "line", .points = {{1, 0}, {4, 3}, {16, 7}}}};
  const std::string svg = draw(plot);
  EXPECT_EQ(count(svg, "<circle"), 3u);
  EXPECT_EQ(svg.find("=\"-"), std::string::npos) << svg;  // no negative coordinate
}

TEST(SvgPlot, DrawsEmptyPlots) {
  EXPECT_TRUE(draw(LinePlot{}).ends_with("</svg>\n"));
  EXPECT_TRUE(draw(BarPlot{}).ends_with("</svg>\n"));
}

}  // namespace
}  // namespace overspill
