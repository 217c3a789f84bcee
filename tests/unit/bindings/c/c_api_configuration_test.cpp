// Configuration texts of every kind: read, or refused by name; never anything else. Mutants of a
// good one, from a seed that failures print.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "tests/unit/bindings/c/small_engine.h"

namespace overspill {
namespace {

using namespace test;

constexpr const char* kGood =
    "precision: bf16\noptimizer: adamw\noptimizer_state: int8\nweight_decay: 0.1\n"
    "max_grad_norm: 1.0\ngradient_accumulation_steps: 4\nseed: 7\nzero_stage: 3\n"
    "unfrozen_parameters: [\"^block\"]\n"
    "offload:\n  device: unified\n  device_memory: 64MiB\n  host_memory: 1GiB\n"
    "  weights: host\n  update: next_forward\n  prefetch_depth: 2\n"
    "  io: {backend: auto, queue_depth: 32}\n";

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : seed_(seed) {}

  std::string operator()(std::string text) {
    const uint64_t changes = 1 + below(4);
    for (uint64_t i = 0; i < changes; ++i) change(text);
    return text;
  }

 private:
  uint64_t below(uint64_t limit) { return random_below(seed_, turn_++, limit); }

  void change(std::string& text) {
    static const std::vector<std::string> kPieces = {
        ":",        "\n",       "  ",   "- ",    "[",     "]",      "{",
        "}",        "\"",       "'",    "&a ",   "*a",    "|",      ">",
        "!!int",    "null",     "auto", "-1",    "1e99",  "nvme",   "99999999999999999999",
        "%",        "#",        "\t",   "---\n", "...",   "<<: *a", "offload: {}\n",
        "\xff\xfe", "\xe2\x82", "~",    "0x10",  "1_000", ".inf"};
    const size_t at = below(text.size() + 1);
    switch (below(5)) {
      case 0: text.insert(at, kPieces[below(kPieces.size())]); break;
      case 1: text.erase(at, below(12)); break;
      case 2:
        if (at < text.size()) text[at] = static_cast<char>(1 + below(255));
        break;
      case 3: text.insert(at, text.substr(below(text.size() + 1), below(30))); break;
      case 4: text.insert(at, std::string(1 + below(40), "[{(:-"[below(5)])); break;
    }
  }

  uint64_t seed_, turn_ = 0;
};

void expect_read_or_refused(const std::string& text) {
  osp_engine_t engine = nullptr;
  const osp_status_t status = osp_engine_create(text.c_str(), nullptr, &engine);
  const std::set<osp_status_t> accepted = {OSP_SUCCESS, OSP_ERROR_INVALID_CONFIG,
                                           OSP_ERROR_NOT_FOUND, OSP_ERROR_INVALID_FILE,
                                           OSP_ERROR_UNSUPPORTED};
  EXPECT_TRUE(accepted.contains(status))
      << osp_status_string(status) << ": " << osp_last_error() << "\n"
      << text;
  if (status == OSP_SUCCESS) {
    EXPECT_EQ(osp_engine_destroy(engine), OSP_SUCCESS);
  } else {
    EXPECT_STRNE(osp_last_error(), "");
    EXPECT_EQ(engine, nullptr);
  }
}

TEST(CApiConfiguration, MutantsAreReadOrRefused) {
  constexpr uint64_t kSeeds = 3000;
  for (uint64_t seed = 0; seed < kSeeds && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_read_or_refused(Mutator(seed)(kGood));
  }
}

TEST(CApiConfiguration, DeepAndLongTextsAreRefused) {
  for (const char open : {'[', '{'}) expect_read_or_refused(std::string(200'000, open));
  std::string nested;
  for (int depth = 0; depth < 5000; ++depth) nested += std::string(depth, ' ') + "a:\n";
  expect_read_or_refused(nested.substr(0, 900'000));
  osp_engine_t engine = nullptr;
  const std::string long_text(2 << 20, '#');
  OSP_EXPECT(OSP_ERROR_INVALID_ARGUMENT, osp_engine_create(long_text.c_str(), nullptr, &engine));
}

TEST(CApiConfiguration, NothingIsAConfigurationToo) {
  for (const char* text : {"", "\n", "# nothing\n", "{}", "null"}) {
    osp_engine_t engine = nullptr;
    OSP_OK(osp_engine_create(text, nullptr, &engine));
    OSP_OK(osp_engine_destroy(engine));
  }
  osp_engine_t engine = nullptr;
  OSP_OK(osp_engine_create(nullptr, nullptr, &engine));
  OSP_OK(osp_engine_destroy(engine));
}

}  // namespace
}  // namespace overspill
