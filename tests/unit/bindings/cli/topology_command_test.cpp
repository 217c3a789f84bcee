// The command as users run it: what it prints, saves, and how it ends.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "engine/base/fd.h"
#include "tests/fault/child_process.h"
#include "tests/unit/offload/topology_files.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

class TopologyCommand : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(directory_); }
  void TearDown() override { fs::remove_all(directory_); }

  test::Child::Result run(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), "topology");
    return test::Child(directory_, arguments, {}).wait();
  }
  /// The file of the two-socket EPYC 9005.
  std::string epyc() const {
    const fs::path path = directory_ / "epyc.xml";
    write_text_file(path, test::Epyc9005Xml().text());
    return path.string();
  }

  const fs::path directory_ =
      fs::temp_directory_path() / fmt::format("overspill-topology-{}", ::getpid());
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(TopologyCommand, PrintsTheTreeAndThePlacementOfASavedHost) {
  const auto result = run({"--load", epyc(), "--ranks", "4"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* line :
       {"AMD EPYC 9575F 64-Core Processor: 2 packages, 2 NUMA nodes, 128 cores, 256 threads, 1.50 "
        "TiB\n",
        "\npackage 1\n  NUMA node 1: 768.00 GiB\n    L3 domain 8: 32.00 MiB, 8 cores, cpus "
        "64-71,192-199\n",
        "\n    drive nvme4n1: SAMSUNG MZWLO3T8HCLS-00A07, 3.49 TiB\n",
        "\n         0    1\n    0   10   32\n    1   32   10\n",
        "\nrank 2 of 4\n  NUMA node 1: its GPU's node, shared with rank 3\n"
        "    compute  cpus 65-95: one thread per core\n",
        "\n  GPU 0000:a1:00.0: nearest to NUMA node 1 (NVIDIA Corporation GB202GL",
        "\n  drive nvme7n1: on the rank's node 1, shared with rank 3\n"}) {
    EXPECT_TRUE(has(result.out, line)) << line << "is not in\n" << result.out;
  }
}

TEST_F(TopologyCommand, SavesWhatItLoadsAgain) {
  const std::string saved = (directory_ / "saved.xml").string();
  const auto first = run({"--load", epyc(), "--save", saved, "--ranks", "2", "--json"});
  const auto second = run({"--load", saved, "--ranks", "2", "--json"});
  EXPECT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(first.out, second.out);
  const auto json = nlohmann::json::parse(second.out);
  EXPECT_EQ(json["machine"]["numa_nodes"][1]["distances"], (std::vector<int>{32, 10}));
  EXPECT_EQ(json["ranks"][1]["cores"][0]["io_cpus"], "64,192");
  EXPECT_EQ(json["ranks"][1]["gpu"]["name"], "0000:a1:00.0");
}

TEST_F(TopologyCommand, SavesThisMachine) {
  const std::string saved = (directory_ / "saved.xml").string();
  const auto here = run({"--save", saved, "--json"});
  EXPECT_EQ(here.exit_code, 0) << here.err;
  EXPECT_EQ(run({"--load", saved, "--json"}).out, here.out);
}

TEST_F(TopologyCommand, ImpossibleRequestsEndInOneLine) {
  struct Case {
    std::vector<std::string> arguments;
    int exit_code;
    const char* reason;
  };
  const std::string bad = (directory_ / "bad.xml").string(), host = epyc();
  write_text_file(bad, "<topology version=\"3.0\">");
  const Case kCases[] = {{{"--load", host, "--ranks", "129"}, 2, "129 ranks on this machine"},
                         {{"--load", host, "--ranks", "2", "--path", "/"}, 2, "leave --path out"},
                         {{"--ranks", "1", "--path", "/proc"}, 2, "is on no single drive"},
                         {{"--load", bad}, 1, "it has hwloc's XML version 3.0"},
                         {{"--load", bad + ".absent"}, 1, "there is no such file"},
                         {{"--save", "/nonexistent/host.xml"}, 1, "/nonexistent/host.xml"}};
  for (const Case& one : kCases) {
    const auto result = run(one.arguments);
    EXPECT_EQ(result.exit_code, one.exit_code) << one.reason;
    EXPECT_TRUE(has(result.err, one.reason)) << result.err;
    EXPECT_EQ(std::ranges::count(result.err, '\n'), 1) << result.err;
  }
}

}  // namespace
}  // namespace overspill
