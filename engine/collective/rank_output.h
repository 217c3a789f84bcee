// A rank's output as the launcher shows it: whole lines with the rank's number in front.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/base/fd.h"

namespace overspill {

class RankOutput {
 public:
  /// Reads from the non-blocking `pipe`.
  RankOutput(Fd pipe, uint32_t rank);

  /// Writes the lines that are there to standard error; false once the other end has closed.
  bool forward();
  /// What is there, and the last line even if it was torn.
  void finish();

  int descriptor() const { return pipe_.get(); }
  bool open() const { return pipe_.valid(); }
  /// The last line that was not empty.
  const std::string& last_line() const { return last_line_; }

 private:
  void take(std::string_view text);
  void end_line();

  Fd pipe_;
  const std::string prefix_;
  std::string line_;   ///< begun, not yet ended
  std::string ready_;  ///< whole lines to write
  std::string last_line_;
};

/// All of it, in one piece where the system allows.
void write_to_standard_error(std::string_view text);

}  // namespace overspill
