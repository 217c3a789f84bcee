// Forecasts: they add up, their lower bound is one, and advice is what the forecast of it says.
#include "engine/forecast/forecast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/base/error.h"
#include "engine/forecast/forecast_report.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

/// All state on drives of 1 MB/s, computing in no time.
ForecastRequest drive_bound() {
  ForecastRequest request;
  request.model = test::tiny_model(false);
  request.options = test::roomy_options();
  request.options.weights = request.options.optimizer = Placement::nvme;
  request.options.gradients = request.options.activations = Placement::host;
  request.hardware.device.peak_flops = 1e15;
  request.hardware.drives = {.read = 1e6, .write = 1e6, .mixed_read = 1e6, .mixed_write = 1e6};
  request.hardware.drives.endurance = 1'000'000'000;
  request.steps = 10;
  return request;
}

TEST(Forecast, OfDriveBoundStepIsItsBytes) {
  const ForecastRequest request = drive_bound();
  const Forecast f = make_forecast(request);
  const double read = static_cast<double>(f.program.lane_bytes(Lane::nvme_read)) / 1e6;
  const double write = static_cast<double>(f.program.lane_bytes(Lane::nvme_write)) / 1e6;
  EXPECT_GT(write, 0);
  EXPECT_NEAR(f.light.seconds, std::max(read, write), 1e-9);
  EXPECT_EQ(f.light.resource, "nvme_read");
  EXPECT_EQ(f.bottleneck, Lane::nvme_read);
  EXPECT_GE(f.seconds(), f.light.seconds);
  EXPECT_LT(f.seconds(), read + write);
  EXPECT_DOUBLE_EQ(f.tokens_per_step, 64);
}

TEST(Forecast, EnduranceIsBytesWritten) {
  const ForecastRequest request = drive_bound();
  const Forecast f = make_forecast(request);
  EXPECT_EQ(f.written_per_step, f.program.lane_bytes(Lane::nvme_write));
  const double steps = 1e9 / static_cast<double>(f.written_per_step);
  ASSERT_TRUE(f.life_days && f.life_share);
  EXPECT_NEAR(*f.life_days, steps * f.seconds() / 86400, 1e-9);
  EXPECT_NEAR(*f.life_share, 10 / steps, 1e-9);
}

TEST(Forecast, LightIsBelowAnySchedule) {
  for (const uint32_t depth : {0u, 1u, 3u}) {
    for (const double read : {1e6, 1e8, 1e10}) {
      ForecastRequest request = drive_bound();
      request.options.prefetch_depth = depth;
      request.options.activations = Placement::nvme;
      request.hardware.device.peak_flops = 1e11;
      request.hardware.drives.read = request.hardware.drives.mixed_read = read;
      request.hardware.drives.mixed_write = 5e5;
      const Forecast f = make_forecast(request);
      EXPECT_LE(f.light.seconds, f.seconds() * (1 + 1e-9)) << depth << " " << read;
      EXPECT_GT(f.light.seconds, 0.3 * f.seconds());
    }
  }
}

TEST(Forecast, LoadingAndSavingMoveTheState) {
  ForecastRequest request = drive_bound();
  const Forecast f = make_forecast(request);
  const auto spilled = static_cast<double>(f.layout.nvme_bytes);
  request.options.gradients = request.options.activations = Placement::nvme;
  const Forecast other = make_forecast(request);
  EXPECT_GT(other.layout.nvme_bytes, f.layout.nvme_bytes);
  EXPECT_EQ(other.load_seconds, f.load_seconds) << "neither gradients nor activations are state";
  EXPECT_EQ(other.save_seconds, f.save_seconds);
  EXPECT_GT(f.load_seconds, spilled / 1e6);
  EXPECT_GT(f.save_seconds, spilled / 1e6);
  EXPECT_LT(f.save_seconds, 2.1 * spilled / 1e6);
}

TEST(Forecast, UseOfTiersAddsUp) {
  ForecastRequest request = drive_bound();
  request.options.activations = Placement::nvme;
  const Forecast f = make_forecast(request);
  const std::array<uint64_t, 3> used = {f.layout.device_bytes, f.layout.host_bytes,
                                        f.layout.nvme_bytes};
  for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
    const TierUse use = tier_use(f.layout, tier);
    EXPECT_EQ(use.used, used[static_cast<size_t>(tier)]);
    EXPECT_EQ(use.weights + use.optimizer + use.gradients + use.activations + use.buffers,
              use.used);
  }
  const TierUse drives = tier_use(f.layout, Tier::nvme);
  EXPECT_EQ(drives.buffers, 0u);
  EXPECT_GT(drives.activations, f.layout.home_bytes(PageKind::activation, Tier::nvme));
}

TEST(Advice, IsWhatItsOwnForecastSays) {
  const ForecastRequest request = drive_bound();
  const std::vector<Advice> advice = advise(request, make_forecast(request));
  const auto named = [&](const std::string& text) {
    return std::ranges::find_if(advice,
                                [&](const Advice& a) { return a.change.starts_with(text); });
  };
  const double now = make_forecast(request).tokens_per_second();
  const auto drives = named("twice the drives");
  ASSERT_NE(drives, advice.end());
  EXPECT_FALSE(drives->setting);
  EXPECT_NEAR(drives->gain, 2, 0.05);
  const auto state = named("optimizer_state: int8");
  ASSERT_NE(state, advice.end());
  ForecastRequest narrow = request;
  narrow.options.optimizer_settings.state = StateFormat::int8;
  EXPECT_DOUBLE_EQ(state->gain, make_forecast(narrow).tokens_per_second() / now);
  EXPECT_TRUE(std::ranges::is_sorted(advice, std::ranges::greater{}, &Advice::gain));
}

TEST(Advice, IsSilentWhereComputeIsTheLimit) {
  ForecastRequest request = drive_bound();
  request.hardware.device.peak_flops = 1e4;
  for (const Advice& a : advise(request, make_forecast(request)))
    ADD_FAILURE() << a.change << " " << a.gain;
}

TEST(ForecastReport, HoldsTheSameNumbersInAllForms) {
  const ForecastRequest request = drive_bound();
  const Forecast f = make_forecast(request);
  const std::vector<Advice> advice = advise(request, f);
  const auto json = nlohmann::json::parse(forecast_json(request, f, advice));
  EXPECT_DOUBLE_EQ(json.at("step_seconds").get<double>(), f.seconds());
  EXPECT_EQ(json.at("lanes").at("nvme_read").at("bytes"), f.program.lane_bytes(Lane::nvme_read));
  EXPECT_EQ(json.at("tiers").at("nvme").at("used"), f.layout.nvme_bytes);
  EXPECT_EQ(json.at("advice").size(), advice.size());
  const std::string text = forecast_text(request, f, advice);
  EXPECT_NE(text.find("busiest lane nvme_read"), std::string::npos) << text;
  EXPECT_NE(text.find("twice the drives (hardware)"), std::string::npos) << text;
  EXPECT_NE(text.find("this run's 10 steps use"), std::string::npos) << text;
  EXPECT_NE(text.find("advice  "), std::string::npos) << text;
  EXPECT_EQ(forecast_text(request, f, {}).find("advice"), std::string::npos) << "none was tried";
  EXPECT_TRUE(nlohmann::json::parse(forecast_json(request, f, {})).at("advice").is_null());
  const std::string html = forecast_html(request, f, advice);
  EXPECT_TRUE(html.ends_with("</html>\n"));
  EXPECT_NE(html.find(">nvme_write</text>"), std::string::npos);
  EXPECT_EQ(html.find("http"), std::string::npos) << "nothing from elsewhere";
}

TEST(ForecastReport, SaysLongTimesInDaysAndLargeSharesInTimes) {
  ForecastRequest request = drive_bound();
  request.steps = 100'000'000;
  const std::string text = forecast_text(request, make_forecast(request), {});
  EXPECT_NE(text.find(" days for 100000000 steps"), std::string::npos) << text;
  EXPECT_NE(text.find("100000000 steps use it up "), std::string::npos) << text;
  EXPECT_EQ(text.find("e+"), std::string::npos) << text;
}

TEST(Forecast, SaysWhatIsShort) {
  ForecastRequest request = drive_bound();
  request.options.nvme_capacity = 1 << 20;
  try {
    make_forecast(request);
    FAIL() << "fits";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::does_not_fit);
    EXPECT_NE(std::string(error.what()).find("offload.nvme_capacity"), std::string::npos);
  }
}

}  // namespace
}  // namespace overspill
