// The real command in a child process: its output, its end, signals to it, a limit of its time.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace overspill::test {

namespace fs = std::filesystem;

inline std::string bytes_of_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// The command in a child process, its output in files. Killed when it is not waited for.
class Child {
 public:
  struct Result {
    int exit_code = -1;  ///< -1 when a signal ended it
    int signal = 0;
    bool timed_out = false;
    std::string out, err;
  };
  struct Options {
    std::optional<size_t> cpus;  ///< run on only so many of the CPUs that this process may use
    std::string program = OVERSPILL_BINARY;  ///< with no slash: looked for in PATH
    std::vector<std::string> environment{};  ///< NAME=value, or NAME to take it away
  };

  Child(const fs::path& directory, const std::vector<std::string>& arguments,
        const Options& options)
      : stem_(directory / ("child-" + std::to_string(++counter()))) {
    std::vector<std::string> words = {options.program}, variables = options.environment;
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    const cpu_set_t cpus = allowed_cpus(options.cpus.value_or(CPU_SETSIZE));
    const std::string out = stem_ + ".out", err = stem_ + ".err";
    pid_ = fork();
    if (pid_ != 0) return;
    if (options.cpus) sched_setaffinity(0, sizeof(cpus), &cpus);
    const int to_out = open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    const int to_err = open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (dup2(to_out, 1) < 0 || dup2(to_err, 2) < 0) _exit(126);
    for (std::string& variable : variables) putenv(variable.data());
    execvp(argv[0], argv.data());
    _exit(127);
  }
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void send(int signal) const {
    if (pid_ > 0) ::kill(pid_, signal);
  }
  pid_t process() const { return pid_; }
  bool ended() {
    if (pid_ <= 0) return true;
    if (waitpid(pid_, &status_, WNOHANG) != pid_) return false;
    pid_ = -1;
    return true;
  }
  std::string out() const { return bytes_of_file(stem_ + ".out"); }

  /// Waits until the condition holds; false when the child ended or the time is over.
  bool wait_until(const std::function<bool()>& condition, double seconds = 60) {
    for (double waited = 0; waited < seconds; waited += 0.002) {
      if (condition()) return true;
      if (ended()) return condition();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return false;
  }
  /// Waits for the end; a child that hangs is killed.
  Result wait(double seconds = 60) {
    Result result;
    result.timed_out = !wait_until([&] { return ended(); }, seconds);
    if (result.timed_out) {
      ::kill(pid_, SIGKILL);
      waitpid(pid_, &status_, 0);
      pid_ = -1;
    }
    if (WIFEXITED(status_)) result.exit_code = WEXITSTATUS(status_);
    if (WIFSIGNALED(status_)) result.signal = WTERMSIG(status_);
    result.out = bytes_of_file(stem_ + ".out");
    result.err = bytes_of_file(stem_ + ".err");
    return result;
  }

  static cpu_set_t allowed_cpus(size_t most) {
    cpu_set_t allowed, chosen;
    CPU_ZERO(&chosen);
    sched_getaffinity(0, sizeof(allowed), &allowed);
    for (size_t cpu = 0, count = 0; cpu < CPU_SETSIZE && count < most; ++cpu) {
      if (CPU_ISSET(cpu, &allowed) && ++count) CPU_SET(cpu, &chosen);
    }
    return chosen;
  }

 private:
  static std::atomic<int>& counter() {
    static std::atomic<int> count = 0;
    return count;
  }
  std::string stem_;
  pid_t pid_ = -1;
  int status_ = 0;
};

}  // namespace overspill::test
