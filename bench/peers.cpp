// Prints published step times of other systems beside the simulator's: under the peer's schedule,
// and the same hardware and model under Overspill's.
#include <fmt/format.h>

#include "bench/peers/published.h"
#include "engine/base/error.h"
#include "engine/plan/profile_file.h"

namespace {

using namespace overspill;

void print_deepspeed(const HardwareProfile& hardware) {
  fmt::print(
      "DeepSpeed ZeRO-3, optimizer on NVMe, 4 GPUs; seconds: published, simulated (ratio)\n\n"
      "| model | forward | backward | update | step | Overspill, optimizer on NVMe | automatic |\n"
      "|---|---|---|---|---|---|---|\n");
  for (const DeepSpeedRow& row : deepspeed_rows()) {
    const PhaseSeconds& p = row.published;
    const PhaseSeconds s = simulate_deepspeed(hardware, row);
    const OverspillSeconds own = overspill_deepspeed(hardware, row);
    fmt::print("| {}, {:.2f}e9 |", row.name, row.parameters * 1e-9);
    for (const auto& [published, simulated] :
         {std::pair{p.forward, s.forward}, std::pair{p.backward, s.backward},
          std::pair{p.update, s.update}, std::pair{p.total(), s.total()}}) {
      fmt::print(" {:.4g}, {:.4g} ({:.2f}) |", published, simulated, simulated / published);
    }
    for (const double seconds : {own.spilled, own.automatic}) {
      fmt::print(" {:.1f} s, {:.0f} tokens/s, {:.2f} x |", seconds, 4 * 2048 / seconds,
                 s.total() / seconds);
    }
    fmt::print("\n");
  }
}

void print_lohan(const HardwareProfile& hardware) {
  fmt::print(
      "\nLoHan, 13B, batch 32, sequence 1024, RTX 4090; TFLOPS of the model\n\n"
      "| drives | published | simulated | ratio | Overspill, all on NVMe | automatic |\n"
      "|---|---|---|---|---|---|\n");
  for (const LohanRow& row : lohan_rows()) {
    const HardwareProfile some = with_drives(hardware, row.drives);
    const double tflops = lohan_tflops(simulate_lohan(some));
    const OverspillSeconds own = overspill_lohan(some);
    fmt::print("| {} | {} | {:.1f} | {:.2f} |", row.drives, row.tflops, tflops,
               tflops / row.tflops);
    for (const double seconds : {own.spilled, own.automatic}) {
      fmt::print(" {:.1f}, {:.2f} x |", lohan_tflops(seconds), lohan_tflops(seconds) / tflops);
    }
    fmt::print("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fmt::print(stderr, "usage: bench_peers DEEPSPEED.yaml LOHAN.yaml\n");
    return 2;
  }
  try {
    print_deepspeed(load_profile(argv[1]));
    print_lohan(load_profile(argv[2]));
  } catch (const Error& error) {
    fmt::print(stderr, "bench_peers: {}\n", error.what());
    return 1;
  }
}
