// Each drive is written, written again (first writes to new blocks are slower) and read.
#include "nvme/drive_probe.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>

#include "engine/base/error.h"

namespace overspill {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kBufferBytes = 8 << 20;
constexpr double kEqual = 1.15;     // rates this near count as the same
constexpr uint32_t kMostTurns = 4;  // of the slowest drive in a round

struct Freed {
  void operator()(std::byte* memory) const { std::free(memory); }
};

/// The fastest way through: one buffer, whole transfers of it.
double measure(const VolumeOptions& options, const IoOptions& io, uint64_t bytes) {
  const Volume volume(options);
  const std::unique_ptr<std::byte, Freed> memory(
      static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, kBufferBytes)));
  std::memset(memory.get(), 0x5a, kBufferBytes);
  Channel channel(volume, io);
  const auto pass = [&](bool write) {
    for (uint64_t at = 0; at < bytes; at += kBufferBytes) {
      const std::array segment = {
          Channel::Segment{at, memory.get(), std::min(kBufferBytes, bytes - at)}};
      write ? channel.write(segment) : channel.read(segment);
    }
  };
  pass(true);
  const Clock::time_point start = Clock::now();
  pass(true);
  pass(false);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return 2 * static_cast<double>(bytes) / std::max(seconds, 1e-6);
}

}  // namespace

std::vector<double> measure_drives(const VolumeOptions& volume, const IoOptions& io,
                                   uint64_t bytes) {
  const size_t count = volume.directories.size();
  std::vector<double> rates(count);
  std::vector<std::exception_ptr> errors(count);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        VolumeOptions one = volume;
        one.directories = {volume.directories[i]};
        one.shares.clear();
        one.capacity_bytes = bytes;
        IoOptions unregistered = io;
        unregistered.buffers.clear();
        rates[i] = measure(one, unregistered, bytes);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return rates;
}

std::vector<uint32_t> shares_of(std::span<const double> rates) {
  CHECK(!rates.empty());
  const auto [slowest, fastest] = std::ranges::minmax(rates);
  std::vector<uint32_t> best(rates.size(), 1);
  if (fastest < kEqual * slowest) return best;
  double least_error = INFINITY;
  for (uint32_t turns = 1; turns <= kMostTurns; ++turns) {
    std::vector<uint32_t> shares;
    double error = 0;
    for (const double rate : rates) {
      const double exact = turns * rate / slowest;
      shares.push_back(static_cast<uint32_t>(std::clamp(std::round(exact), 1.0, 64.0)));
      error = std::max(error, std::abs(shares.back() / exact - 1));
    }
    if (error < least_error - 0.02) {  // more turns only where they fit clearly better
      least_error = error;
      best = shares;
    }
  }
  return best;
}

}  // namespace overspill
