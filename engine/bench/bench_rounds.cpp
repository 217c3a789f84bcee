// Timing.
#include "engine/bench/bench_rounds.h"

#include <fmt/format.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "engine/base/error.h"

namespace overspill {
namespace {

using SteadyClock = std::chrono::steady_clock;

/// Repeats a work for so long; amounts per second.
double rate_of(const BenchWork& work, double seconds) {
  const auto start = SteadyClock::now();
  std::chrono::duration<double> passed{};
  double calls = 0;
  do {
    work.run();
    ++calls;
    passed = SteadyClock::now() - start;
  } while (passed.count() < seconds);
  return work.amount * calls / passed.count();
}

}  // namespace

std::vector<double> rates_together(std::span<const BenchWork> works, double seconds) {
  if (works.size() == 1) return {rate_of(works.front(), seconds)};
  std::vector<double> rates(works.size());
  std::atomic<std::ptrdiff_t> unmeasured{static_cast<std::ptrdiff_t>(works.size())};
  std::exception_ptr failure;
  std::mutex failing;
  std::barrier start(unmeasured.load());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < works.size(); ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      try {
        rates[i] = rate_of(works[i], seconds);
        --unmeasured;
        while (unmeasured > 0) works[i].run();
      } catch (...) {
        unmeasured = 0;
        const std::lock_guard lock(failing);
        if (!failure) failure = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  return rates;
}

std::vector<std::vector<double>> BenchRounds::measure(std::span<const BenchTask> tasks) {
  std::vector<std::vector<std::vector<double>>> samples(tasks.size());
  std::vector<size_t> order(tasks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (uint32_t round = 0; round < options_.rounds; ++round) {
    for (const size_t i : shuffled(order, done_ + 1)) {
      if (stop_) fail(ErrorCode::cancelled, "benchmark interrupted; nothing is written");
      const BenchTask& task = tasks[i];
      if (task.prepare) task.prepare();
      const std::vector<double> rates = rates_together(task.works, options_.seconds);
      samples[i].resize(rates.size());
      std::string text = task.name + ":";
      for (size_t work = 0; work < rates.size(); ++work) {
        samples[i][work].push_back(rates[work]);
        text += fmt::format("{}{:.3g}", work == 0 ? " " : " + ", rates[work] * 1e-9);
      }
      ++done_;
      progress_(done_, std::max(total_, done_), text + " " + task.unit);
    }
  }
  std::vector<std::vector<double>> medians(tasks.size());
  for (size_t i = 0; i < tasks.size(); ++i) {
    for (const auto& values : samples[i]) medians[i].push_back(median(values));
  }
  return medians;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

}  // namespace overspill
