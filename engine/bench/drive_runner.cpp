// Timed transfers of pages. A side counts from its first call until the first call that ends after
// its budget; with two sides, each goes on until both have counted, so that neither is ever timed
// while the other rests.
#include "engine/bench/drive_runner.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <numeric>
#include <thread>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/random.h"
#include "engine/base/thread.h"

namespace overspill {
namespace {

using SteadyClock = std::chrono::steady_clock;

double seconds_since(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

/// User and system time so far: of all threads (RUSAGE_SELF) or of this one (RUSAGE_THREAD).
double cpu_seconds(int who) {
  rusage usage{};
  CHECK(::getrusage(who, &usage) == 0);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void fill_random(const Arena& arena) {
  parallel_blocks(arena.bytes() / 8, 1 << 20, [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) {
      const uint64_t bits = mix64(i);
      std::memcpy(arena.memory() + 8 * i, &bits, 8);
    }
  });
}

}  // namespace

BenchBuffers::BenchBuffers(uint64_t page, uint32_t count)
    : page_bytes(page),
      pages(count),
      read(page * count, "benchmark"),
      write(page * count, "benchmark") {
  fill_random(write);
}

/// One direction of one run.
struct DriveRunner::Side {
  bool writes;
  uint64_t first_page, page_count;
  PageOrder order;
  uint64_t seed;
  std::byte* memory;
  Channel channel;
  std::vector<uint64_t> pages{};                      // in this pass's order
  uint64_t turn = 0;                                  // pages asked for so far
  std::vector<Channel::Segment> call{}, last_call{};  // those under way
  // Counted by run_side:
  bool counting = true;
  uint64_t bytes = 0;
  double seconds = 0;
  double cpu_seconds = 0;
  std::exception_ptr failure;
};

/// What the sides of a run share.
struct DriveRunner::Clock {
  Budget budget;
  SteadyClock::time_point start;
  std::atomic<uint32_t>& counting;  // sides that still count
  std::atomic<bool>& failed;
};

DriveRunner::DriveRunner(const Options& options, BenchBuffers& buffers)
    : options_(options), buffers_(buffers) {
  const uint64_t pages_per_drive = options.bytes_per_drive / buffers.page_bytes;
  page_count_ = pages_per_drive * options.directories.size();
  CHECK(pages_per_drive >= 2 && options.pages_per_call <= buffers.pages);
  std::vector<BenchDirectory> own;
  VolumeOptions volume;
  for (const auto& parent : options.directories) {
    own.emplace_back(parent);
    volume.directories.push_back(own.back().path());
  }
  volume.capacity_bytes = bytes();
  volume.stripe_bytes = options.stripe_bytes;
  volume_.emplace(volume);
  if (!options.verify) return;
  std::vector<Integrity::Region> pages;
  for (uint64_t page = 0; page < page_count_; ++page) {
    pages.push_back({page * buffers.page_bytes, buffers.page_bytes});
  }
  integrity_.emplace(*volume_, options.stripe_bytes, std::move(pages),
                     [](size_t page) { return fmt::format("benchmark page {}", page); });
}

IoOptions DriveRunner::io_for(const BenchPoint& point, bool writes) const {
  IoOptions io = options_.io;
  io.block_size = point.block_bytes;
  io.queue_depth = (writes ? point.write_depth : point.read_depth) *
                   static_cast<uint32_t>(options_.directories.size());
  io.write_depth = point.write_depth;
  io.buffers = {{buffers_.read.memory(), buffers_.read.bytes()},
                {buffers_.write.memory(), buffers_.write.bytes()}};
  return io;
}

/// Starts the transfer of the side's next pages.
void DriveRunner::start_call(Side& side, uint64_t pages) {
  std::swap(side.call, side.last_call);
  side.call.clear();
  for (const uint64_t end = side.turn + pages; side.turn < end; ++side.turn) {
    const uint64_t at = side.turn % side.page_count;
    if (at == 0 && side.order == PageOrder::random) {  // Fisher and Yates
      for (uint64_t i = side.page_count - 1; i > 0; --i) {
        std::swap(side.pages[i], side.pages[random_below(side.seed, side.turn + i, i + 1)]);
      }
    }
    side.call.push_back({.offset = side.pages[at] * buffers_.page_bytes,
                         .memory = side.memory + side.turn % buffers_.pages * buffers_.page_bytes,
                         .bytes = buffers_.page_bytes});
  }
  side.writes ? side.channel.start_write(side.call) : side.channel.start_read(side.call);
}

/// Starts the next call, unless there are enough under way or all has been asked for.
bool DriveRunner::start_next(Side& side, const Clock& clock) {
  const Budget& budget = clock.budget;
  uint64_t pages = options_.pages_per_call;
  if (budget.bytes > 0) {
    const uint64_t asked = side.turn * buffers_.page_bytes;
    if (asked >= budget.bytes) return false;
    pages = std::min(pages, ceil_div(budget.bytes - asked, buffers_.page_bytes));
  } else if (!side.counting && clock.counting.load() == 0) {
    return false;
  }
  if (side.channel.started() > 0) {
    // Calls under way share no memory, and are of one pass over the pages: they share no page.
    const bool one_pass =
        (side.turn - 1) / side.page_count == (side.turn + pages - 1) / side.page_count;
    if (side.channel.started() == Channel::kMostStarted || !one_pass ||
        2 * pages > buffers_.pages) {
      return false;
    }
  }
  start_call(side, pages);
  return true;
}

void DriveRunner::run_side(Side& side, const Clock& clock) {
  set_thread_name(side.writes ? "bench-write" : "bench-read");
  side.pages.resize(side.page_count);
  std::iota(side.pages.begin(), side.pages.end(), side.first_page);
  const Budget& budget = clock.budget;
  for (;;) {
    if (clock.failed.load()) return;
    if (options_.stop != nullptr && options_.stop->load()) {
      fail(ErrorCode::cancelled, "benchmark interrupted; its files are removed");
    }
    // As in training, a call's requests follow the last one's without a gap.
    while (start_next(side, clock)) {
    }
    if (side.channel.started() == 0) return;
    side.channel.finish();
    if (!side.counting) continue;
    const uint64_t moved = side.channel.stats().bytes;
    const double seconds = seconds_since(clock.start);
    if (budget.bytes > 0 ? moved < budget.bytes : seconds < budget.seconds) continue;
    side.bytes = moved;
    side.seconds = seconds;
    side.counting = false;
    clock.counting.fetch_sub(1);
  }
}

BenchRates DriveRunner::run(const BenchPoint& point, const Budget& budget) {
  CHECK(!options_.verify || point.block_bytes == options_.stripe_bytes);
  const bool mixed = point.traffic == Traffic::mixed;
  const uint64_t half = page_count_ / 2;
  std::vector<std::unique_ptr<Side>> sides;
  const auto add = [&](bool writes) {
    // Both at once work on halves of their own, as no page is read while it is written.
    sides.emplace_back(new Side{
        .writes = writes,
        .first_page = mixed && writes ? half : 0,
        .page_count = mixed ? half : page_count_,
        .order = point.order,
        .seed = ++seed_,
        .memory = (writes ? buffers_.write : buffers_.read).memory(),
        .channel = Channel(*volume_, io_for(point, writes), integrity_ ? &*integrity_ : nullptr),
        .failure = nullptr});
    backend_ = sides.back()->channel.backend();
  };
  if (point.traffic != Traffic::write) add(false);
  if (point.traffic != Traffic::read) add(true);

  std::atomic<uint32_t> counting{static_cast<uint32_t>(sides.size())};
  std::atomic<bool> failed{false};
  const double cpu_before = cpu_seconds(RUSAGE_SELF);
  const Clock clock{budget, SteadyClock::now(), counting, failed};
  std::vector<std::thread> threads;
  for (const auto& side : sides) {
    threads.emplace_back([&, s = side.get()] {
      try {
        run_side(*s, clock);
        s->cpu_seconds = cpu_seconds(RUSAGE_THREAD);
      } catch (...) {
        s->failure = std::current_exception();
        failed = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& side : sides) {
    if (side->failure) std::rethrow_exception(side->failure);
  }
  const double cpu = cpu_seconds(RUSAGE_SELF) - cpu_before;
  BenchRates rates;
  uint64_t moved = 0;
  double slowest = 0, lanes_cpu = 0;
  for (const auto& side : sides) {
    moved += side->channel.stats().bytes;
    slowest = std::max(slowest, side->seconds);
    lanes_cpu += side->cpu_seconds;
  }
  for (const auto& side : sides) {
    const double seconds = budget.bytes > 0 ? slowest : side->seconds;
    (side->writes ? rates.write : rates.read) = static_cast<double>(side->bytes) / seconds;
  }
  rates.cpu_seconds_per_gb = cpu / (static_cast<double>(moved) * 1e-9);
  rates.lane_cpu_seconds_per_gb = lanes_cpu / (static_cast<double>(moved) * 1e-9);
  return rates;
}

double DriveRunner::write_first() {
  const BenchPoint point{.traffic = Traffic::write,
                         .order = PageOrder::sequential,
                         .block_bytes = options_.stripe_bytes,
                         .write_depth = 8};
  return run(point, {.bytes = bytes()}).write;
}

}  // namespace overspill
