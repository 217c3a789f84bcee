// Dumps of small layouts and Programs against tests/golden/programs, so that a change of plan can
// be read as a difference of text. OVERSPILL_UPDATE_GOLDENS=1 writes them anew.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "engine/base/fd.h"
#include "engine/plan/planner.h"
#include "engine/program/dump.h"
#include "engine/program/verify.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;
using test::tiny_model;

/// Two blocks, two micro-batches, all state on NVMe, a device with a memory of its own.
PlanOptions golden_options() {
  PlanOptions o = test::roomy_options();
  o.unified = false;
  o.weights = o.optimizer = o.gradients = Placement::nvme;
  o.activations = Placement::device;
  o.chunk_parameters = 16384;
  o.prefetch_depth = 1;
  return o;
}

void expect_golden(const std::string& name, const PlanOptions& options, const StepKind& kind) {
  const Layout layout = plan_layout(tiny_model(false, 2), options);
  const Program program = plan_step(layout, kind);
  verify_program(program, layout);
  const std::string text = dump_layout(layout) + dump_program(program, layout);
  const fs::path path = fs::path(OVERSPILL_SOURCE_DIR) / "tests/golden/programs" / (name + ".txt");
  if (std::getenv("OVERSPILL_UPDATE_GOLDENS") != nullptr) {
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
    GTEST_SKIP() << path << " is written anew";
  }
  ASSERT_TRUE(fs::exists(path)) << path;
  const std::string golden = read_text_file(path);
  const size_t same = static_cast<size_t>(
      std::mismatch(text.begin(), text.end(), golden.begin(), golden.end()).first - text.begin());
  const size_t line = text.rfind('\n', same == 0 ? 0 : same - 1) + 1;
  EXPECT_TRUE(text == golden) << name << ".txt differs first at: "
                              << text.substr(line, text.find('\n', line) - line)
                              << "\nIf the plan should change, run the test with "
                                 "OVERSPILL_UPDATE_GOLDENS=1 and look at the difference.";
}

TEST(GoldenPrograms, Plain) {
  expect_golden("plain", golden_options(), {true, true, true, false, 2});
}

TEST(GoldenPrograms, Twice) {
  PlanOptions o = golden_options();
  o.update_twice.assign(4, true);
  expect_golden("twice", o, {true, true, true, false, 2});
}

TEST(GoldenPrograms, InBackward) {
  PlanOptions o = golden_options();
  o.update = UpdateTiming::in_backward;
  o.gradients = Placement::automatic;
  expect_golden("in_backward", o, {true, true, false, false, 2});
}

TEST(GoldenPrograms, TwoRanks) {
  PlanOptions o = golden_options();
  o.ranks = 2;
  o.rank = 1;
  expect_golden("two_ranks", o, {true, true, true, false, 2});
}

}  // namespace
}  // namespace overspill
