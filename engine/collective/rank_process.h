// One rank's process as the launcher sees it: started in a group of its own, its pipes, its end.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/collective/rank_output.h"

namespace overspill {

struct RankEnd {
  int exit_code = 0;
  int signal = 0;  ///< that killed it, or 0
  bool failed() const { return exit_code != 0 || signal != 0; }
};

class RankProcess {
 public:
  struct Start {
    uint32_t rank = 0;
    const std::vector<std::string>& command;
    /// Set in the environment; an empty value takes the variable away.
    const std::vector<std::pair<std::string, std::string>>& environment;
    const sigset_t& signals;  ///< blocked in the rank
  };
  /// Throws Error(io) when there can be no process.
  explicit RankProcess(const Start& start);
  /// Kills what is left of it.
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  pid_t process() const { return process_; }
  bool running() const { return !end_; }
  /// To all processes of its group.
  void send(int signal) const;
  /// Notes the end if it has come; true when that is news.
  bool reap();
  const RankEnd& end() const { return *end_; }

  /// Its pipes: standard error, and standard output except rank 0's.
  std::vector<std::unique_ptr<RankOutput>>& outputs() { return outputs_; }
  const std::string& last_error_line() const { return outputs_.front()->last_line(); }

 private:
  [[noreturn]] static void become(const Start& start, pid_t launcher, int error, int output);

  pid_t process_ = -1;
  std::vector<std::unique_ptr<RankOutput>> outputs_;
  std::optional<RankEnd> end_;
};

}  // namespace overspill
