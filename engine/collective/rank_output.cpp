// Cuts a pipe's bytes into lines. One thread; lines of several ranks never mix, for each is written
// whole.
#include "engine/collective/rank_output.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace overspill {
namespace {

/// A longer line is cut: a rank must not fill the launcher's memory.
constexpr size_t kMaxLineBytes = 65536;
constexpr size_t kMaxLastReads = 256;

}  // namespace

void write_to_standard_error(std::string_view text) {
  while (!text.empty()) {
    const ssize_t put = ::write(STDERR_FILENO, text.data(), text.size());
    if (put >= 0) {
      text.remove_prefix(static_cast<size_t>(put));
    } else if (errno == EAGAIN) {
      pollfd wait{STDERR_FILENO, POLLOUT, 0};
      poll(&wait, 1, -1);
    } else if (errno != EINTR) {
      return;  // nobody reads it any more
    }
  }
}

RankOutput::RankOutput(Fd pipe, uint32_t rank)
    : pipe_(std::move(pipe)), prefix_("[rank " + std::to_string(rank) + "] ") {}

bool RankOutput::forward() {
  std::array<char, 16384> block;
  ssize_t got = 0;
  do {
    got = ::read(pipe_.get(), block.data(), block.size());
  } while (got < 0 && errno == EINTR);
  if (got > 0) {
    take({block.data(), static_cast<size_t>(got)});
    write_to_standard_error(ready_);
    ready_.clear();
    return true;
  }
  if (got < 0 && errno == EAGAIN) return true;
  pipe_.reset();
  return false;
}

void RankOutput::finish() {
  // A program that the rank has left behind may hold the pipe open: only what is there counts.
  for (size_t reads = 0; pipe_.valid() && reads < kMaxLastReads; ++reads) {
    pollfd wait{pipe_.get(), POLLIN, 0};
    if (poll(&wait, 1, 0) <= 0) break;
    forward();
  }
  pipe_.reset();
  if (!line_.empty()) end_line();
  write_to_standard_error(ready_);
  ready_.clear();
}

void RankOutput::take(std::string_view text) {
  while (!text.empty()) {
    const size_t length = std::min(text.find('\n'), kMaxLineBytes - line_.size());
    line_ += text.substr(0, length);
    text.remove_prefix(std::min(length, text.size()));
    const bool ended = text.starts_with('\n');
    if (ended) text.remove_prefix(1);
    if (ended || line_.size() == kMaxLineBytes) end_line();
  }
}

void RankOutput::end_line() {
  ready_ += prefix_ + line_ + "\n";
  if (line_.find_first_not_of(" \t\r") != std::string::npos) last_line_ = line_;
  line_.clear();
}

}  // namespace overspill
