// The benchmarks of one `overspill bench` call: runs them, prints what they found, and gathers
// their sections and the hardware profile that they fill in. One thread.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "bindings/cli/bench_command.h"
#include "engine/bench/bench_host.h"
#include "engine/bench/bench_rounds.h"
#include "engine/bench/bench_section.h"
#include "engine/bench/collective_benchmark.h"
#include "engine/plan/profile.h"

namespace overspill {

class BenchSession {
 public:
  /// Loads the profile that --profile names, when it is there. Throws Error.
  BenchSession(const BenchArguments& arguments, const std::atomic<bool>& stop, const Ranks& ranks);

  /// Runs what was asked for and writes its files. Throws Error(cancelled) when stopped.
  void run();

 private:
  void run_one(const std::string& benchmark);
  void run_all();
  void run_nvme(bool verify);
  void run_contention();
  void add(BenchSection section);
  /// Notes in the profile that a benchmark filled its part in.
  void sign(const std::string& benchmark);

  const BenchArguments& arguments_;
  const std::atomic<bool>& stop_;
  const Ranks& ranks_;
  const Machine machine_;
  const BenchHost host_;
  HardwareProfile profile_;
  std::vector<BenchSection> sections_;
  std::string nvme_json_, nvme_html_;  ///< of drives alone, in a form of their own
};

}  // namespace overspill
