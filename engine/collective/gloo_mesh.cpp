// Gloo's sharp edges are dealt with here. When a connection ends, Gloo wakes only transfers that
// have not begun; so a thread watches all connections through a receive that is never answered, and
// wakes the rest. A rank that leaves says goodbye first: its closing is then no failure to the
// others.
#include "engine/collective/gloo_mesh.h"

#include <gloo/rendezvous/context.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/thread.h"

namespace overspill {

using gloo::transport::UnboundBuffer;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

struct GlooDevice {
  std::shared_ptr<gloo::transport::Device> transport;
};

namespace {

constexpr uint64_t kWatchSlot = 14ull << 60, kGoodbyeSlot = 15ull << 60;  // above all others
constexpr milliseconds kForever = std::chrono::hours(24 * 365), kGoodbyeTime{2000};

/// Gloo's view of the run's key-value store.
class GroupStore final : public gloo::rendezvous::Store {
 public:
  explicit GroupStore(const CollectiveGroup& group) : group_(group) {}
  void set(const std::string& key, const std::vector<char>& value) override {
    group_.set(full(key), {value.begin(), value.end()});
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = group_.get(full(key));
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) group_.get(full(key));
  }
  void wait(const std::vector<std::string>& keys, const milliseconds&) override { wait(keys); }

 private:
  std::string full(const std::string& key) const { return group_.name + "/gloo/" + key; }
  const CollectiveGroup& group_;
};

std::shared_ptr<gloo::rendezvous::Context> connect(const CollectiveGroup& group,
                                                   GlooDevice& device) {
  auto context = std::make_shared<gloo::rendezvous::Context>(static_cast<int>(group.rank),
                                                             static_cast<int>(group.size));
  // Gloo waits five times as long for a connection.
  context->setTimeout(std::max(group.timeout / 5, milliseconds{1}));
  GroupStore store(group);
  try {
    context->connectFullMesh(store, device.transport);
  } catch (const Error&) {
    throw;  // the store's own
  } catch (const std::exception& error) {
    fail(ErrorCode::rank_lost,
         "group \"{}\": rank {} cannot connect to the others within {} ms: {}; check that every "
         "rank runs and that firewalls let their hosts reach each other",
         group.name, group.member(group.rank), group.timeout.count(), error.what());
  }
  return context;
}

}  // namespace

std::shared_ptr<GlooDevice> open_gloo_device(const std::string& own_address) {
  struct sigaction present {};
  if (sigaction(SIGPIPE, nullptr, &present) == 0 && present.sa_handler == SIG_DFL) {
    std::signal(SIGPIPE, SIG_IGN);
  }
  try {
    gloo::transport::tcp::attr attributes;
    attributes.hostname = own_address;
    return std::make_shared<GlooDevice>(GlooDevice{gloo::transport::tcp::CreateDevice(attributes)});
  } catch (const std::exception& error) {
    fail(ErrorCode::rank_lost,
         "cannot listen for other ranks at {}: {}; it must be an address of this host", own_address,
         error.what());
  }
}

struct GlooMesh::Impl {
  Impl(const CollectiveGroup& of, std::shared_ptr<GlooDevice> with)
      : group(of), device(std::move(with)), context(connect(group, *device)) {
    for (uint32_t peer = 0; peer < group.size; ++peer) {
      goodbyes.push_back(context->createUnboundBuffer(&byte, 1));
      departed.push_back(peer == group.rank);
      if (peer == group.rank) continue;
      try {
        goodbyes[peer]->recv(static_cast<int>(peer), kGoodbyeSlot);
      } catch (const std::exception& error) {
        lose(peer, error.what());
        check();
      }
    }
    watcher = std::thread([this] { watch(); });
  }

  void check() const {
    if (!failed) return;
    const std::lock_guard lock(mutex);
    throw Error(ErrorCode::rank_lost, reason);
  }

  /// The first reason stays. Wakes whoever waits.
  void end(const std::string& why, bool from_outside) {
    const std::lock_guard lock(mutex);
    if (failed) return;
    reason = why;
    told = from_outside;
    failed = true;
    for (UnboundBuffer* buffer : buffers) wake(buffer);
  }
  void lose(uint32_t peer, const std::string& why) {
    end(fmt::format("group \"{}\": rank {} lost rank {}: {}; see the messages of that rank",
                    group.name, group.member(group.rank), group.member(peer), why),
        false);
  }
  static void wake(UnboundBuffer* buffer) {
    buffer->abortWaitRecv();
    buffer->abortWaitSend();
  }

  void enter(UnboundBuffer* buffer) {
    const std::lock_guard lock(mutex);
    if (failed) throw Error(ErrorCode::rank_lost, reason);
    buffers.push_back(buffer);
  }
  void leave(UnboundBuffer* buffer) {
    const std::lock_guard lock(mutex);
    std::erase(buffers, buffer);
  }

  milliseconds patience() const { return group.patience.value_or(group.timeout); }

  /// Gloo's call on a connection to `peer`; false: it was woken.
  template <class F>
  void guard(uint32_t peer, const char* verb, F&& call) {
    check();
    const auto start = steady_clock::now();
    bool done = false;
    try {
      done = call();
    } catch (const std::exception& error) {
      if (steady_clock::now() - start < patience()) {
        lose(peer, error.what());
      } else {
        lose(peer, fmt::format("it {} nothing for {} ms: it hangs, is stopped or is cut off", verb,
                               patience().count()));
      }
    }
    if (!done) check();
  }

  void watch();
  bool all_departed();
  void say_goodbye();

  const CollectiveGroup group;
  const std::shared_ptr<GlooDevice> device;
  const std::shared_ptr<gloo::rendezvous::Context> context;
  char byte = 0;
  std::vector<std::unique_ptr<UnboundBuffer>> goodbyes;  ///< by rank
  std::vector<bool> departed;                            ///< said goodbye; the watcher's
  mutable std::mutex mutex;
  std::atomic<bool> failed{false};
  bool closing = false;                 ///< guarded by the mutex, like all below
  std::string reason;                   ///< why it failed
  bool told = false;                    ///< by abort()
  std::vector<UnboundBuffer*> buffers;  ///< where threads may wait
  std::thread watcher;
};

void GlooMesh::Impl::watch() {
  set_thread_name("gloo-watch");
  for (uint64_t round = 0;; ++round) {
    char never = 0;
    const auto buffer = context->createUnboundBuffer(&never, 1);
    {
      const std::lock_guard lock(mutex);
      if (closing || failed) break;
      buffers.push_back(buffer.get());
    }
    try {
      for (uint32_t peer = 0; peer < group.size; ++peer) {
        if (!departed[peer]) buffer->recv(static_cast<int>(peer), kWatchSlot + round);
      }
      buffer->waitRecv(nullptr, kForever);  // false: woken at the end or after a failure
      leave(buffer.get());
      break;
    } catch (const std::exception&) {
      leave(buffer.get());
    }
    if (!all_departed()) break;
  }
  // So the others learn of it. Who was told from outside leaves that to whoever told: else the
  // others might take this rank for the lost one.
  if (failed && !told) context->closeConnections();
}

/// Of the connections that have ended: whether the other side had said goodbye. Names one that
/// had not.
bool GlooMesh::Impl::all_departed() {
  char never = 0;
  const auto probe = context->createUnboundBuffer(&never, 1);
  for (uint32_t peer = 0; peer < group.size; ++peer) {
    if (departed[peer]) continue;
    std::string why;
    try {
      probe->recv(static_cast<int>(peer), kWatchSlot - 1);
      continue;
    } catch (const std::exception& error) {
      why = error.what();
    }
    try {
      departed[peer] = goodbyes[peer]->waitRecv(nullptr, milliseconds{0});
    } catch (const std::exception&) {
      // A timeout closes all connections, and its own thread says whose it was.
      if (why.find("Application timeout") == std::string::npos) lose(peer, why);
      return false;
    }
  }
  return true;
}

/// What is unread when a connection closes would be lost to the other side as well: so all wait
/// until all are done, if they are within a short time.
void GlooMesh::Impl::say_goodbye() {
  const auto deadline = steady_clock::now() + std::min(group.timeout, kGoodbyeTime);
  const auto left = [&] {
    const auto time = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
    return std::max(time, milliseconds{0});
  };
  const auto farewell = context->createUnboundBuffer(&byte, 1);
  uint32_t sent = 0;
  try {
    for (uint32_t peer = 0; peer < group.size; ++peer) {
      if (departed[peer]) continue;
      farewell->send(static_cast<int>(peer), kGoodbyeSlot);
      ++sent;
    }
    while (sent-- > 0) farewell->waitSend(nullptr, left());
    for (uint32_t peer = 0; peer < group.size; ++peer) {
      if (!departed[peer]) goodbyes[peer]->waitRecv(nullptr, left());
    }
  } catch (const std::exception&) {  // one is gone: nothing is left to be done
  }
}

GlooMesh::GlooMesh(const CollectiveGroup& group, std::shared_ptr<GlooDevice> device)
    : impl_(std::make_unique<Impl>(group, std::move(device))) {}

GlooMesh::~GlooMesh() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->closing = true;
    for (UnboundBuffer* buffer : impl_->buffers) Impl::wake(buffer);
  }
  impl_->watcher.join();
  if (!impl_->failed) impl_->say_goodbye();
}

void GlooMesh::check() const { impl_->check(); }
void GlooMesh::abort(const std::string& reason) { impl_->end(reason, true); }

struct GlooMesh::PeerBuffer::Impl {
  Impl(GlooMesh::Impl& of, uint32_t with, void* memory, size_t bytes)
      : mesh(of), peer(with), buffer(mesh.context->createUnboundBuffer(memory, bytes)) {
    mesh.enter(buffer.get());
  }
  ~Impl() { mesh.leave(buffer.get()); }
  GlooMesh::Impl& mesh;
  const uint32_t peer;
  const std::unique_ptr<UnboundBuffer> buffer;
};

GlooMesh::PeerBuffer::PeerBuffer(GlooMesh& mesh, uint32_t peer, void* memory, size_t bytes)
    : impl_(std::make_unique<Impl>(*mesh.impl_, peer, memory, bytes)) {}
GlooMesh::PeerBuffer::~PeerBuffer() = default;
GlooMesh::PeerBuffer::PeerBuffer(PeerBuffer&&) noexcept = default;

void GlooMesh::PeerBuffer::send(uint64_t slot, size_t offset, size_t bytes) {
  impl_->mesh.guard(impl_->peer, "takes", [&] {
    impl_->buffer->send(static_cast<int>(impl_->peer), slot, offset, bytes);
    return true;
  });
}
void GlooMesh::PeerBuffer::receive(uint64_t slot, size_t offset, size_t bytes) {
  impl_->mesh.guard(impl_->peer, "sends", [&] {
    impl_->buffer->recv(static_cast<int>(impl_->peer), slot, offset, bytes);
    return true;
  });
}
void GlooMesh::PeerBuffer::wait_sent() {
  impl_->mesh.guard(impl_->peer, "takes",
                    [&] { return impl_->buffer->waitSend(nullptr, impl_->mesh.patience()); });
}
void GlooMesh::PeerBuffer::wait_received() {
  impl_->mesh.guard(impl_->peer, "sends",
                    [&] { return impl_->buffer->waitRecv(nullptr, impl_->mesh.patience()); });
}

}  // namespace overspill
