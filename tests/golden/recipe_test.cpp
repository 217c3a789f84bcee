// The figures in docs/recipes are what the commands beside them print. OVERSPILL_UPDATE_GOLDENS=1
// writes the pages anew.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "engine/base/fd.h"
#include "tests/fault/child_process.h"
#include "tests/fault/disk_fixture.h"

namespace overspill::test {
namespace {

namespace fs = std::filesystem;

using RecipeTest = DiskTest;

std::vector<std::string> words_of(const std::string& command) {
  std::istringstream stream(command);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) {
    std::erase(word, '"');  // as a shell takes them
    words.push_back(word);
  }
  return words;
}

/// The page with the output of every "$ overspill ..." line of its console blocks put below it.
std::string with_outputs(const fs::path& page, const fs::path& outputs) {
  std::istringstream stream(read_text_file(page));
  std::string text;
  bool console = false;
  for (std::string line; std::getline(stream, line);) {
    const bool fence = line.starts_with("```");
    if (fence) console = line == "```console";
    if (console && !fence && !line.starts_with("$ ")) continue;  // an old output
    text += line + "\n";
    if (!console || !line.starts_with("$ overspill ")) continue;
    std::vector<std::string> words = words_of(line.substr(12));
    for (std::string& word : words) {  // paths in the page start at its directory
      if (word.ends_with(".json") || word.ends_with(".yaml")) {
        word = (page.parent_path() / word).lexically_normal();
      }
    }
    const Child::Result result = Child(outputs, words, {}).wait();
    EXPECT_EQ(result.exit_code, 0) << line << "\n" << result.err;
    text += result.out;
  }
  return text;
}

TEST_F(RecipeTest, FiguresAreWhatTheCommandsPrint) {
  size_t pages = 0;
  for (const auto& entry :
       fs::directory_iterator(fs::path(OVERSPILL_SOURCE_DIR) / "docs/recipes")) {
    if (entry.path().extension() != ".md") continue;
    ++pages;
    const std::string fresh = with_outputs(entry.path(), root_);
    if (std::getenv("OVERSPILL_UPDATE_GOLDENS") != nullptr) write_text_file(entry.path(), fresh);
    EXPECT_EQ(read_text_file(entry.path()), fresh)
        << "OVERSPILL_UPDATE_GOLDENS=1 writes " << entry.path() << " anew";
  }
  EXPECT_GT(pages, 0u);
}

}  // namespace
}  // namespace overspill::test
