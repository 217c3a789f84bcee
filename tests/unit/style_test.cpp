// The rules of the house that a program can check: sizes, opening comments, include direction.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxLines = 400, kMaxColumns = 100;

struct Source {
  std::string path;  ///< relative to the repository
  std::vector<std::string> lines;
};

const std::vector<Source>& sources() {
  static const std::vector<Source> all = [] {
    std::vector<Source> found;
    const fs::path root = OVERSPILL_SOURCE_DIR;
    for (const char* folder :
         {"engine", "nvme", "offload", "optim", "bindings", "tests", "bench"}) {
      for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
        const std::string extension = entry.path().extension().string();
        if (extension != ".h" && extension != ".cpp" && extension != ".cu") continue;
        Source source{fs::relative(entry.path(), root).string(), {}};
        std::ifstream file(entry.path());
        for (std::string line; std::getline(file, line);) source.lines.push_back(line);
        found.push_back(std::move(source));
      }
    }
    return found;
  }();
  return all;
}

/// Rooms in the order includes may point: a file includes its own rank or lower ones.
int rank_of(const std::string& path) {
  static const std::vector<std::pair<std::string, int>> kRanks = {
      {"engine/base/", 0}, {"nvme/", 1},     {"offload/", 2}, {"optim/", 3},
      {"engine/", 4},      {"bindings/", 5}, {"bench/", 6},   {"tests/", 6}};
  for (const auto& [prefix, rank] : kRanks) {
    if (path.starts_with(prefix)) return rank;
  }
  return -1;
}

TEST(Style, FindsTheSources) { EXPECT_GT(sources().size(), 80u); }

size_t line_limit(const std::string& path) {
  if (path == "bindings/include/overspill.h") return SIZE_MAX;  // a manual, and one file for all
  return path.starts_with("tests/") ? kMaxLines + 50 : kMaxLines;
}

TEST(Style, FilesAndLinesAreShort) {
  for (const Source& source : sources()) {
    EXPECT_LE(source.lines.size(), line_limit(source.path)) << source.path;
    for (size_t i = 0; i < source.lines.size(); ++i) {
      EXPECT_LE(source.lines[i].size(), kMaxColumns) << source.path << ":" << i + 1;
    }
  }
}

TEST(Style, FilesOpenWithTheirPurpose) {
  for (const Source& source : sources()) {
    ASSERT_FALSE(source.lines.empty()) << source.path;
    EXPECT_TRUE(source.lines[0].starts_with("// ")) << source.path;
    if (!source.path.ends_with(".h")) continue;
    bool once = false;
    for (const std::string& line : source.lines) once |= line == "#pragma once";
    EXPECT_TRUE(once) << source.path;
  }
}

TEST(Style, IncludesPointOneWay) {
  for (const Source& source : sources()) {
    for (const std::string& line : source.lines) {
      if (!line.starts_with("#include \"")) continue;
      const std::string target = line.substr(10, line.rfind('"') - 10);
      EXPECT_LE(rank_of(target), rank_of(source.path)) << source.path << " includes " << target;
    }
  }
}

TEST(Style, HeadersOfLibrariesStayInTheirFiles) {
  const std::multimap<std::string, std::string> homes = {
      {"<liburing.h>", "nvme/uring_io.cpp"},
      {"<libaio.h>", "nvme/libaio_io.cpp"},
      {"<blkid/blkid.h>", "nvme/raw_device.cpp"},
      {"<isa-l/crc.h>", "nvme/integrity.cpp"},
      {"<hwloc.h>", "offload/topology.cpp"},
      {"<hwloc.h>", "offload/topology_xml.cpp"},
      {"<hwloc.h>", "offload/numa_binding.cpp"},
      {"<yaml-cpp/yaml.h>", "engine/train/config"},
      {"<yaml-cpp/yaml.h>", "engine/plan/profile_file.cpp"},
      {"<gloo/rendezvous/context.h>", "engine/collective/gloo_mesh.cpp"},
      {"<boost/asio.hpp>", "engine/collective/"}};
  for (const Source& source : sources()) {
    for (const std::string& line : source.lines) {
      if (!line.starts_with("#include <")) continue;
      const auto [first, last] = homes.equal_range(line.substr(9));
      bool home = first == last;
      for (auto it = first; it != last; ++it) home |= source.path.starts_with(it->second);
      EXPECT_TRUE(home) << source.path << ": " << line;
    }
  }
}

}  // namespace
