// fork, exec and wait for one rank. The launcher has one thread, so the child may do as it likes
// between the two.
#include "engine/collective/rank_process.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "engine/base/error.h"

namespace overspill {
namespace {

struct Pipe {
  Fd read, write;
};

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    fail(ErrorCode::io,
         "make a pipe for a rank's output: {}; start fewer ranks, or raise ulimit -n",
         errno_text(errno));
  }
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  return {Fd(ends[0], "a rank's output"), Fd(ends[1], "a rank's output")};
}

}  // namespace

RankProcess::RankProcess(const Start& start) {
  Pipe error = make_pipe(), output;
  if (start.rank != 0) output = make_pipe();
  const pid_t launcher = getpid();
  process_ = fork();
  if (process_ < 0) {
    fail(ErrorCode::io, "start rank {}: {}; start fewer ranks, or raise ulimit -u", start.rank,
         errno_text(errno));
  }
  if (process_ == 0) become(start, launcher, error.write.get(), output.write.get());
  // Here too: a signal may be sent before the child has come to it.
  setpgid(process_, process_);
  outputs_.push_back(std::make_unique<RankOutput>(std::move(error.read), start.rank));
  if (output.read.valid()) {
    outputs_.push_back(std::make_unique<RankOutput>(std::move(output.read), start.rank));
  }
}

void RankProcess::become(const Start& start, pid_t launcher, int error, int output) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  // The launcher may have died before that.
  if (getppid() != launcher) _exit(128 + SIGTERM);
  const int input = open("/dev/null", O_RDONLY);
  const bool connected = dup2(input, STDIN_FILENO) >= 0 && dup2(error, STDERR_FILENO) >= 0 &&
                         (output < 0 || dup2(output, STDOUT_FILENO) >= 0);
  if (!connected) _exit(126);
  for (const auto& [name, value] : start.environment) {
    value.empty() ? unsetenv(name.c_str()) : setenv(name.c_str(), value.c_str(), 1);
  }
  std::vector<char*> words;
  for (const std::string& word : start.command) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  sigprocmask(SIG_SETMASK, &start.signals, nullptr);
  execvp(words[0], words.data());
  write_to_standard_error(
      fmt::format("overspill: io: start {}: {}\n", words[0], errno_text(errno)));
  _exit(127);
}

RankProcess::~RankProcess() {
  if (process_ <= 0 || end_) return;
  send(SIGKILL);
  waitpid(process_, nullptr, 0);
}

void RankProcess::send(int signal) const {
  // Once it is reaped, its number may belong to another.
  if (!end_) kill(-process_, signal);
}

bool RankProcess::reap() {
  if (end_) return false;
  siginfo_t news{};
  if (waitid(P_PID, static_cast<id_t>(process_), &news, WEXITED | WNOHANG | WNOWAIT) != 0) {
    fail(ErrorCode::io, "wait for process {}: {}", process_, errno_text(errno));
  }
  if (news.si_pid == 0) return false;
  // Before it is reaped its group is surely its own: what it has left behind ends with it.
  send(SIGKILL);
  int status = 0;
  waitpid(process_, &status, 0);
  RankEnd end;
  if (WIFEXITED(status)) end.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
  end_ = end;
  return true;
}

}  // namespace overspill
