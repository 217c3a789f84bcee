// Byte sizes, durations and counts as people read and write them.
#include "engine/base/units.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/base/error.h"

namespace overspill {
namespace {

TEST(ParseDuration, ReadsWhatFormatDurationWrites) {
  using std::chrono::milliseconds;
  const std::vector<std::pair<std::string, int64_t>> cases = {{"0ms", 0},      {"1500ms", 1500},
                                                              {"30s", 30'000}, {"90s", 90'000},
                                                              {"5m", 300'000}, {"2h", 7200'000}};
  for (const auto& [text, count] : cases) {
    EXPECT_EQ(parse_duration(text), milliseconds(count)) << text;
    EXPECT_EQ(format_duration(milliseconds(count)), text);
  }
  EXPECT_EQ(format_duration(milliseconds(60'000)), "1m");
  for (const char* text : {"", "30", "s", "-1s", "1.5s", "30 s", "30sec", "99999999999s"}) {
    EXPECT_EQ(parse_duration(text), std::nullopt) << text;
  }
}

TEST(ParseBytes, AcceptsBinaryAndDecimalUnits) {
  const std::vector<std::pair<std::string, uint64_t>> cases = {
      {"0", 0},
      {"4096", 4096},
      {"512 B", 512},
      {"1KiB", 1024},
      {"512MiB", 512 * kMiB},
      {"1.5 GiB", kGiB + kGiB / 2},
      {"2GB", 2'000'000'000},
      {"3tb", 3'000'000'000'000},
      {"  7 kb ", 7000},
      {"2TiB", 2 * kTiB},
      {"18446744073709551615", UINT64_MAX},
  };
  for (const auto& [text, bytes] : cases) EXPECT_EQ(parse_bytes(text), bytes) << text;
}

TEST(ParseBytes, RefusesEverythingElseAndSaysWhatIsAccepted) {
  const std::vector<std::string> cases = {"",
                                          "GiB",
                                          "-1",
                                          "1.2.3GiB",
                                          "12 parsecs",
                                          "4G",
                                          "0x10",
                                          "1e9",
                                          "1,5GiB",
                                          "0.5",
                                          "18446744073709551616",
                                          "16777217TiB",
                                          "+5",
                                          "1 Gi",
                                          "5GiB please",
                                          "99999999999999999999999GiB",
                                          "."};
  for (const std::string& text : cases) {
    try {
      ADD_FAILURE() << '"' << text << "\" was read as " << parse_bytes(text);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_config);
      const std::string message = error.what();
      EXPECT_NE(message.find('"' + text + '"'), std::string::npos) << message;
      EXPECT_NE(message.find("512MiB"), std::string::npos) << message;
    }
  }
}

TEST(FormatBytes, PicksTheUnitAndNeverPrints1024) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(kMiB - 1), "1.00 MiB");
  EXPECT_EQ(format_bytes(kGiB + kGiB / 2), "1.50 GiB");
  EXPECT_EQ(format_bytes(2000 * kTiB), "2000.00 TiB");
}

TEST(FormatRate, IsDecimal) {
  EXPECT_EQ(format_rate(512), "512.0 B/s");
  EXPECT_EQ(format_rate(1.234e9), "1.2 GB/s");
  EXPECT_EQ(format_rate(999.99e6), "1.0 GB/s");
}

TEST(FormatSeconds, PicksTheUnitAndRoundsOver) {
  EXPECT_EQ(format_seconds(0), "0 us");
  EXPECT_EQ(format_seconds(350e-6), "350 us");
  EXPECT_EQ(format_seconds(999.9e-6), "1.0 ms");
  EXPECT_EQ(format_seconds(12.3e-3), "12.3 ms");
  EXPECT_EQ(format_seconds(4.56), "4.56 s");
  EXPECT_EQ(format_seconds(59.999), "1m00s");
  EXPECT_EQ(format_seconds(123), "2m03s");
  EXPECT_EQ(format_seconds(3599.7), "1h00m");
  EXPECT_EQ(format_seconds(3725), "1h02m");
  EXPECT_EQ(format_seconds(99 * 3600), "99h00m");
  EXPECT_EQ(format_seconds(137231.1 * 3600), "5718 days");
  EXPECT_EQ(format_seconds(-0.5), "-500.0 ms");
}

TEST(FormatCount, PicksTheUnit) {
  EXPECT_EQ(format_count(512), "512");
  EXPECT_EQ(format_count(4'200), "4.2K");
  EXPECT_EQ(format_count(3'200'000), "3.2M");
  EXPECT_EQ(format_count(1'100'000'000), "1.10B");
  EXPECT_EQ(format_count(999'960'000), "1.00B");
}

TEST(NearestName, FindsTyposButNotStrangers) {
  const std::vector<std::string> names = {"sequence_len", "learning_rate", "seed", "io"};
  EXPECT_EQ(nearest_name("sequence_length", names), "sequence_len");
  EXPECT_EQ(nearest_name("Learning_Rate", names), "learning_rate");
  EXPECT_EQ(nearest_name("sed", names), "seed");
  EXPECT_EQ(nearest_name("lora_alpha", names), "");
  EXPECT_EQ(nearest_name("a", names), "");
  EXPECT_EQ(nearest_name("x", std::vector<std::string>{}), "");
}

TEST(RoundUp, WorksForAnyMultiple) {
  EXPECT_EQ(round_up(0, 4096), 0u);
  EXPECT_EQ(round_up(1, 4096), 4096u);
  EXPECT_EQ(round_up(14, 7), 14u);
  EXPECT_EQ(ceil_div(15, 7), 3u);
}

}  // namespace
}  // namespace overspill
