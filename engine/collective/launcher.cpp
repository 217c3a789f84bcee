// The launcher's loop: output, signals and ends, in one thread without any other.
#include "engine/collective/launcher.h"

#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#include "engine/base/error.h"
#include "engine/collective/launch_verdict.h"
#include "engine/collective/rank_process.h"
#include "engine/collective/token_proof.h"

namespace overspill {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kTokenBytes = 16;
constexpr int kInterrupted = 130;
/// Below Linux's ephemeral range: a port of that may be gone before rank 0 listens there.
constexpr uint16_t kFirstPort = 20000, kPorts = 12000;

bool port_is_free(uint16_t port) {
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "a socket");
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

std::string choose_port() {
  if (const char* given = std::getenv("OVERSPILL_MASTER_PORT")) {
    if (*given != '\0') return given;
  }
  uint16_t random = 0;
  std::memcpy(&random, random_bytes(sizeof random).data(), sizeof random);
  for (uint16_t i = 0; i < kPorts; ++i) {
    const auto port = static_cast<uint16_t>(kFirstPort + (random % kPorts + i) % kPorts);
    if (port_is_free(port)) return std::to_string(port);
  }
  fail(ErrorCode::io, "no port from {} to {} is free at 127.0.0.1; set OVERSPILL_MASTER_PORT",
       kFirstPort, kFirstPort + kPorts - 1);
}

/// Blocks the signals that the launcher handles; the destructor gives back what was.
class SignalQueue {
 public:
  SignalQueue() {
    sigset_t handled;
    sigemptyset(&handled);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&handled, signal);
    sigprocmask(SIG_BLOCK, &handled, &before_);
    // Ignored, which a parent may have left to us, ended children would vanish unseen.
    signal(SIGCHLD, SIG_DFL);
    fd_ = Fd(signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK), "signals");
    CHECK(fd_.valid());
  }
  ~SignalQueue() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  int descriptor() const { return fd_.get(); }
  const sigset_t& before() const { return before_; }
  std::optional<int> next() {
    signalfd_siginfo news{};
    if (::read(fd_.get(), &news, sizeof news) != sizeof news) return std::nullopt;
    return static_cast<int>(news.ssi_signo);
  }

 private:
  sigset_t before_;
  Fd fd_;
};

class Launch {
 public:
  explicit Launch(const LaunchOptions& options) : options_(options), killed_(options.ranks) {
    const std::string port = choose_port(), token = to_hex(random_bytes(kTokenBytes));
    const std::string ranks = std::to_string(options.ranks);
    for (uint32_t rank = 0; rank < options.ranks; ++rank) {
      const std::string number = std::to_string(rank);
      const std::vector<std::pair<std::string, std::string>> environment = {
          {"RANK", number},
          {"WORLD_SIZE", ranks},
          {"LOCAL_RANK", number},
          {"LOCAL_WORLD_SIZE", ranks},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", port},
          {"OVERSPILL_TOKEN", token},
          {"OVERSPILL_LAUNCHER", "overspill"},
          {"OVERSPILL_MASTER_PORT", ""}};
      const RankProcess::Start start{.rank = rank,
                                     .command = options.command,
                                     .environment = environment,
                                     .signals = signals_.before()};
      ranks_.push_back(std::make_unique<RankProcess>(start));
    }
  }

  int run() {
    while (running()) {
      wait();
      while (const auto signal = signals_.next()) handle(*signal);
      for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
        if (ranks_[rank]->reap()) note_end(rank);
      }
      if (deadline_ && Clock::now() >= *deadline_) kill_all();
    }
    const LaunchVerdict verdict = judge_launch(outcomes_, interrupt_, options_.grace);
    if (!verdict.text.empty()) write_to_standard_error(verdict.text + "\n");
    return verdict.exit_code;
  }

 private:
  bool running() const { return outcomes_.size() < ranks_.size(); }

  /// Until there is output, a signal or the deadline; forwards the output.
  void wait() {
    std::vector<pollfd> waits = {{signals_.descriptor(), POLLIN, 0}};
    std::vector<RankOutput*> outputs;
    for (const auto& rank : ranks_) {
      for (const auto& output : rank->outputs()) {
        if (!output->open()) continue;
        outputs.push_back(output.get());
        waits.push_back({output->descriptor(), POLLIN, 0});
      }
    }
    int timeout = -1;
    if (deadline_) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - Clock::now());
      timeout = static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60000));
    }
    if (poll(waits.data(), waits.size(), timeout) <= 0) return;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (waits[i + 1].revents != 0) outputs[i]->forward();
    }
  }

  void handle(int signal) {
    if (signal == SIGCHLD) return;
    if (interrupt_ != 0) return kill_all();
    interrupt_ = signal == SIGHUP ? SIGTERM : signal;
    for (const auto& rank : ranks_) rank->send(interrupt_);
  }

  void note_end(uint32_t rank) {
    RankProcess& process = *ranks_[rank];
    for (const auto& output : process.outputs()) output->finish();
    const RankEnd& end = process.end();
    outcomes_.push_back({.rank = rank,
                         .process = process.process(),
                         .exit_code = end.exit_code,
                         .signal = end.signal,
                         .killed_by_launcher = killed_[rank] && end.signal == SIGKILL,
                         .last_line = process.last_error_line()});
    auto deadline = Clock::now() + options_.grace;
    if (!end.failed() || end.exit_code == kInterrupted) deadline += options_.patience;
    deadline_ = std::min(deadline_.value_or(deadline), deadline);
  }

  void kill_all() {
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (!ranks_[rank]->running()) continue;
      killed_[rank] = true;
      ranks_[rank]->send(SIGKILL);
    }
    deadline_ = Clock::now() + options_.grace;
  }

  const LaunchOptions& options_;
  SignalQueue signals_;
  std::vector<std::unique_ptr<RankProcess>> ranks_;
  std::vector<bool> killed_;
  std::vector<RankOutcome> outcomes_;  ///< in the order of the ends
  std::optional<Clock::time_point> deadline_;
  int interrupt_ = 0;
};

}  // namespace

int launch_ranks(const LaunchOptions& options) {
  CHECK(options.ranks > 0 && !options.command.empty());
  return Launch(options).run();
}

}  // namespace overspill
