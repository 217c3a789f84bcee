// A benchmark's report as a table for the terminal, as JSON, and as one HTML page that needs
// nothing else. Pure functions.
#pragma once

#include <string>

#include "engine/bench/nvme_sweep.h"

namespace overspill {

/// Rates in GB/s (10^9 bytes), the recommended points marked with `*`.
std::string bench_text(const NvmeBenchReport& report);
/// One object; rates in bytes per second. Its keys are listed in docs/benchmarks.md.
std::string bench_json(const NvmeBenchReport& report);
std::string bench_html(const NvmeBenchReport& report);
/// What is below the page's heading.
std::string bench_html_body(const NvmeBenchReport& report);

/// "block size 1.00 MiB, depth 4 for reads and 16 for writes": what to set.
std::string describe_recommendation(const Recommendation& best);

}  // namespace overspill
