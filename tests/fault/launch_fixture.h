// Ranks as processes of a test: forked functions, their ends, signals to them.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>

namespace overspill::test {

using std::chrono::milliseconds;

inline testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << part << "\" is not in \"" << text << "\"";
}

/// A port below the ephemeral range that nobody listens at now.
inline uint16_t free_port() {
  static std::mt19937 random{std::random_device{}()};
  for (;;) {
    const auto port = static_cast<uint16_t>(12000 + random() % 20000);
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    const bool free = bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    close(socket);
    if (free) return port;
  }
}

/// A function in a process of its own. Killed when it is not waited for.
class ForkedRank {
 public:
  struct Result {
    int exit_code = -1;  ///< 0: the function returned; 1: it threw; -1: see signal
    int signal = 0;
    bool timed_out = false;
    std::string text;  ///< what it returned, or the exception's
  };

  explicit ForkedRank(const std::function<std::string()>& body) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return;
    process_ = fork();
    if (process_ == 0) run(body, ends[1]);
    close(ends[1]);
    pipe_ = ends[0];
  }
  ForkedRank(ForkedRank&& other) noexcept
      : process_(std::exchange(other.process_, -1)), pipe_(std::exchange(other.pipe_, -1)) {}
  ForkedRank& operator=(ForkedRank&&) = delete;
  ~ForkedRank() {
    if (process_ > 0) {
      ::kill(process_, SIGKILL);
      waitpid(process_, nullptr, 0);
    }
    if (pipe_ >= 0) close(pipe_);
  }

  pid_t process() const { return process_; }
  void send(int signal) const { ::kill(process_, signal); }

  Result wait(milliseconds limit) {
    Result result;
    int status = 0;
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (waitpid(process_, &status, WNOHANG) == 0) {
      if (!result.timed_out && std::chrono::steady_clock::now() > deadline) {
        result.timed_out = true;
        ::kill(process_, SIGKILL);
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
    process_ = -1;
    if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
    char block[4096];
    for (ssize_t got; (got = read(pipe_, block, sizeof block)) > 0;) result.text.append(block, got);
    return result;
  }

 private:
  [[noreturn]] static void run(const std::function<std::string()>& body, int pipe) {
    int code = 0;
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = error.what();
      code = 1;
    }
    _exit(write(pipe, text.data(), text.size()) < 0 ? 2 : code);
  }

  pid_t process_ = -1;
  int pipe_ = -1;
};

}  // namespace overspill::test
