// Tests counted from GoogleTest's own report.
#include <fmt/format.h>

#include <fstream>

#include "bench/gpu/sections.h"
#include "engine/base/error.h"

namespace overspill {
namespace {

using Json = nlohmann::ordered_json;

struct Counts {
  uint64_t passed = 0, failed = 0, skipped = 0;
  Json failures = Json::array();

  void add(const std::string& suite, const Json& test) {
    const bool fails = test.contains("failures");
    const bool skips = test.value("result", "") == "SKIPPED";
    ++(fails ? failed : skips ? skipped : passed);
    if (fails) failures.push_back(suite + "." + test.value("name", ""));
  }
};

void count(const Json& report, Counts& counts) {
  for (const Json& suite : report.at("testsuites")) {
    for (const Json& test : suite.at("testsuite")) counts.add(suite.at("name"), test);
  }
}

}  // namespace

BenchSection tests_section(const std::vector<std::filesystem::path>& results,
                           std::vector<std::string> notes) {
  Counts counts;
  for (const std::filesystem::path& path : results) {
    std::ifstream file(path);
    try {
      count(Json::parse(file), counts);
    } catch (const nlohmann::json::exception& error) {
      fail(ErrorCode::invalid_config,
           "--tests {}: no report of GoogleTest: {}; write one with --gtest_output=json:FILE",
           path.string(), error.what());
    }
  }
  const BenchTable table{.title = "tests on the GPU",
                         .columns = {"", "passed", "failed", "skipped"},
                         .rows = {{"tests", std::to_string(counts.passed),
                                   std::to_string(counts.failed), std::to_string(counts.skipped)}}};
  const Json of_caller = notes;
  for (const std::string name : counts.failures) notes.push_back("failed: " + name);
  return make_section("tests", "Tests", {&table, 1}, {}, notes,
                      {{"passed", counts.passed},
                       {"failed", counts.failed},
                       {"skipped", counts.skipped},
                       {"failures", counts.failures},
                       {"notes", of_caller}});
}

}  // namespace overspill
