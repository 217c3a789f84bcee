// What a Channel keeps about its requests and the transfers under way. Private to nvme.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "nvme/integrity.h"
#include "nvme/volume.h"

namespace overspill {

/// A request in flight.
struct Channel::Slot {
  IoRequest request;             // what is left of it
  Transfer* transfer = nullptr;  // what it is a part of
  uint32_t bytes = 0;            // of all of it
  Integrity::Place place;        // with an Integrity: what it holds
  uint32_t tries = 0;            // without progress
  bool held = false;             // by a request that is not done
  bool submitted = false;        // and in flight
  bool reread = false;
  Clock::time_point start;  // of its last submission
};

struct Channel::Failure {
  enum class Kind : uint8_t { result, stuck, content, never_written } kind;
  Slot slot;
  IoResult result{};
  std::string text{};
};

/// One transfer: where cutting stands, what is done, and the first failure.
struct Channel::Transfer {
  std::span<const Segment> segments;
  bool write = false;
  uint64_t total_bytes = 0;
  uint64_t done_bytes = 0;
  size_t next_segment = 0;
  uint64_t next_byte = 0;  // in that segment
  Integrity::Place place;  // of that byte, with an Integrity
  uint64_t batch_bytes = 0;
  uint32_t held = 0;  // slots
  std::optional<Failure> failure = std::nullopt;

  bool all_cut() const { return next_segment == segments.size(); }
};

}  // namespace overspill
