// Prints a run's metrics.jsonl as the table that bench/RESULTS.md keeps: per step the time, the
// rate at 8 FLOPs per parameter and token (forward 2, recompute 2, backward 4), bytes per parameter
// on the NVMe lanes, stalls; and the totals.
#include <fmt/format.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace {

using nlohmann::json;

double lane(const json& object, const char* field, const char* name) {
  return object.at(field).value(name, 0.0);
}

void print_step(const json& step, double parameters, double tokens, double sgemm) {
  const double seconds = step.at("step_seconds");
  const double rate = 8.0 * parameters * tokens / seconds * 1e-9;
  double stall = 0;
  for (const auto& [name, value] : step.at("stall_seconds").items()) stall += value.get<double>();
  fmt::print(
      "| {} | {:.2f} | {:.1f} | {} | {:.3f} | {:.3f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} "
      "|\n",
      step.at("step").get<uint64_t>(), seconds, rate,
      sgemm > 0 ? fmt::format("{:.1f} %", 100.0 * rate / sgemm) : "-",
      lane(step, "lane_bytes", "nvme_read") / parameters,
      lane(step, "lane_bytes", "nvme_write") / parameters,
      lane(step, "lane_busy_seconds", "nvme_read"), lane(step, "lane_busy_seconds", "nvme_write"),
      lane(step, "lane_busy_seconds", "optimizer"), stall);
}

void print_final(const json& total) {
  const double predicted = total.at("predicted_step_seconds");
  const double measured = total.at("measured_step_seconds");
  fmt::print("\nlast step: predicted {:.2f} s, measured {:.2f} s, ratio {:.3f}\n", predicted,
             measured, predicted / measured);
  fmt::print("memory: device {:.0f} MiB, host {:.0f} MiB, process peak {:.0f} MiB\n",
             total.at("device_memory_peak").get<double>() / (1 << 20),
             total.at("host_memory_peak").get<double>() / (1 << 20),
             total.at("peak_rss").get<double>() / (1 << 20));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    fmt::print(stderr, "usage: bench_report METRICS.jsonl PARAMETERS [SGEMM_GFLOPS]\n");
    return 2;
  }
  std::ifstream file(argv[1]);
  const double parameters = std::atof(argv[2]), sgemm = argc > 3 ? std::atof(argv[3]) : 0;
  if (!file || parameters <= 0) {
    fmt::print(stderr, "bench_report: cannot read {}, or PARAMETERS is not a number\n", argv[1]);
    return 1;
  }
  fmt::print(
      "| step | seconds | GFLOP/s | of sgemm | read B/param | written B/param | "
      "nvme_read s | nvme_write s | optimizer s | stall s |\n"
      "|---|---|---|---|---|---|---|---|---|---|\n");
  double tokens_before = 0;
  for (std::string line; std::getline(file, line);) {
    const json object = json::parse(line);
    if (object.contains("final")) {
      print_final(object);
    } else if (object.contains("loss")) {
      const double tokens = object.at("tokens");
      print_step(object, parameters, tokens - tokens_before, sgemm);
      tokens_before = tokens;
    }
  }
  return 0;
}
