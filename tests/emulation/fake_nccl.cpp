// NCCL's C ABI between ranks that are threads of one process, on host memory. Calls only put work
// on streams, as the real ones do; a rank that never comes leaves the others waiting until they
// abort. Stricter than NCCL: all ranks must make the same calls in the same order, and a
// communicator that is still busy with a call must be polled before the next one. Wrong use is an
// error with a text; partial sums of bf16 are rounded at every hop, and no sum is in the order of
// ranks.
#include "tests/emulation/fake_nccl.h"

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "engine/collective/nccl_library.h"
#include "tests/emulation/fake_nccl_moves.h"

namespace overspill {

struct World;

struct NcclComm {
  std::shared_ptr<World> world;
  int rank = 0;
  bool gone = false;  ///< aborted or destroyed
  int error = 0;      ///< asynchronous
  int polls = 0;      ///< until the last call is done
  uint64_t next_call = 0;
  std::vector<struct Transfer> grouped;
};

namespace {

constexpr int kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6;

std::mutex mutex;  // of everything
std::condition_variable changed;
FakeNcclEnqueue enqueue_hook = nullptr;
int failing_rank = -1;
std::string last_text = "no error";
std::map<std::string, std::shared_ptr<World>> worlds;  // by unique id
std::map<NcclComm*, std::shared_ptr<NcclComm>> comms;
uint64_t ids = 0;
thread_local int group_depth = 0;
thread_local std::vector<std::pair<NcclComm*, void*>> group_comms;  // with streams

int wrong(int code, const std::string& text) {
  last_text = text;
  std::fprintf(stderr, "fake NCCL: %s\n", text.c_str());
  return code;
}

}  // namespace

/// One send or receive of a group.
struct Transfer {
  bool sends = false;
  const void* from = nullptr;
  void* to = nullptr;
  uint64_t count = 0;
  int type = 0, peer = 0;
  bool* done = nullptr;
};

/// A call of all ranks.
struct Call {
  std::string signature;  ///< of the rank that came first
  int first_rank = 0, arrived = 0, left = 0;
  bool done = false;
  std::vector<const void*> from;
  std::vector<void*> to;
};

struct World {
  int size = 0, joined = 0;
  std::vector<bool> taken;
  std::vector<NcclComm*> ranks;  ///< null before they join and after they leave
  std::map<uint64_t, Call> calls;
  std::map<std::pair<int, int>, std::deque<Transfer>> sends, receives;  ///< by source, target
  bool complete() const { return joined == size; }
  void fail(int code, const std::string& text) {
    wrong(code, text);
    for (NcclComm* comm : ranks) {
      if (comm && comm->error == 0) comm->error = code;
    }
    changed.notify_all();
  }
};

namespace {

/// A rank's part of a call, on its stream.
struct Work {
  std::shared_ptr<NcclComm> comm;
  FakeNcclKind kind;
  uint64_t call, count = 0;
  int type = 0, root = 0;
  const void* from = nullptr;
  void* to = nullptr;
  std::vector<Transfer> transfers{};
  std::string signature{};
};

bool ended(const NcclComm& comm) {
  return comm.gone || comm.error != 0 || comm.rank == failing_rank;
}

/// Notes that this rank makes the call; false when the others make another one.
bool arrive(const Work& work, World& world) {
  Call& call = world.calls[work.call];
  if (call.arrived++ == 0) {
    call.signature = work.signature;
    call.first_rank = work.comm->rank;
    call.from.resize(world.size);
    call.to.resize(world.size);
  }
  call.from[work.comm->rank] = work.from;
  call.to[work.comm->rank] = work.to;
  if (call.signature == work.signature) return true;
  world.fail(kInvalidUsage, "call " + std::to_string(work.call) + " differs: rank " +
                                std::to_string(call.first_rank) + " calls " + call.signature +
                                ", rank " + std::to_string(work.comm->rank) + " calls " +
                                work.signature);
  return false;
}

void match(World& world, int source, int target) {
  auto& sends = world.sends[{source, target}];
  auto& receives = world.receives[{source, target}];
  while (!sends.empty() && !receives.empty()) {
    const Transfer& send = sends.front();
    const Transfer& receive = receives.front();
    if (send.count != receive.count || send.type != receive.type) {
      return world.fail(kInvalidUsage, "rank " + std::to_string(source) + " sends " +
                                           std::to_string(send.count) + " elements, rank " +
                                           std::to_string(target) + " receives " +
                                           std::to_string(receive.count));
    }
    std::memcpy(receive.to, send.from, send.count * fake_nccl_width(send.type));
    *send.done = *receive.done = true;
    sends.pop_front();
    receives.pop_front();
  }
}

void run_group(const Work& work, World& world, std::unique_lock<std::mutex>& lock) {
  const auto done = std::make_unique<bool[]>(work.transfers.size());
  const int own = work.comm->rank;
  for (size_t i = 0; i < work.transfers.size(); ++i) {
    Transfer transfer = work.transfers[i];
    transfer.done = &done[i];
    const int source = transfer.sends ? own : transfer.peer;
    const int target = transfer.sends ? transfer.peer : own;
    (transfer.sends ? world.sends : world.receives)[{source, target}].push_back(transfer);
    match(world, source, target);
  }
  changed.notify_all();
  changed.wait(lock, [&] {
    bool all = true;
    for (size_t i = 0; i < work.transfers.size(); ++i) all &= done[i];
    return all || ended(*work.comm);
  });
  for (auto* queues : {&world.sends, &world.receives}) {  // what has not been matched ends here
    for (auto& [ranks, queue] : *queues) {
      std::erase_if(queue, [&](const Transfer& transfer) {
        return transfer.done >= done.get() && transfer.done < done.get() + work.transfers.size();
      });
    }
  }
}

void run(const Work& work) {
  std::unique_lock lock(mutex);
  World& world = *work.comm->world;
  if (ended(*work.comm) || !arrive(work, world)) return;
  Call& call = world.calls[work.call];
  if (work.kind == FakeNcclKind::group) {
    run_group(work, world, lock);
  } else if (call.arrived == world.size) {
    fake_nccl_move(call.from, call.to, work.kind, work.count, work.type, work.root);
    call.done = true;
    changed.notify_all();
  } else {
    changed.wait(lock, [&] { return call.done || ended(*work.comm); });
    if (!call.done) call.arrived = -world.size;  // never done: this rank's memory may be gone
  }
  if (++call.left == world.size) world.calls.erase(work.call);
}

int put(void* stream, Work work) {
  if (!enqueue_hook)
    return wrong(kInvalidUsage, "no fake_nccl_set_enqueue() before the first call");
  work.comm->polls = work.comm->rank % 3;
  const int result = work.comm->polls > 0 ? kNcclInProgress : kNcclSuccess;
  auto* task = new Work(std::move(work));
  enqueue_hook(
      stream,
      [](void* argument) {
        const std::unique_ptr<Work> own(static_cast<Work*>(argument));
        run(*own);
      },
      task);
  return result;
}

/// Null with the error where a call must not be made.
std::shared_ptr<NcclComm> usable(NcclComm* comm, const char* function, int& error) {
  const auto found = comms.find(comm);
  if (found == comms.end() || found->second->gone) {
    error = wrong(kInvalidArgument, std::string(function) + " on a communicator that is gone");
  } else if (found->second->error != 0) {
    error = found->second->error;
  } else if (!found->second->world->complete() || found->second->polls > 0) {
    error = wrong(kInvalidUsage, std::string(function) + " while the call before is in progress");
  } else {
    return found->second;
  }
  return nullptr;
}

int collective(const char* name, FakeNcclKind kind, const void* from, void* to, uint64_t count,
               int type, int root, NcclComm* comm, void* stream) {
  const std::lock_guard lock(mutex);
  int error = 0;
  const auto own = usable(comm, name, error);
  if (!own) return error;
  if (group_depth > 0) return wrong(kInvalidUsage, std::string(name) + " within a group");
  Work work{.comm = own,
            .kind = kind,
            .call = own->next_call++,
            .count = count,
            .type = type,
            .root = root,
            .from = from,
            .to = to};
  work.signature = std::string(name) + " of " + std::to_string(count) + " elements of type " +
                   std::to_string(type) + ", root " + std::to_string(root);
  return put(stream, std::move(work));
}

int transfer(const char* name, Transfer what, NcclComm* comm, void* stream) {
  const std::lock_guard lock(mutex);
  int error = 0;
  const auto own = usable(comm, name, error);
  if (!own) return error;
  if (group_depth == 0) return wrong(kInvalidUsage, std::string(name) + " outside of a group");
  if (what.peer < 0 || what.peer >= own->world->size) {
    return wrong(kInvalidArgument, std::string(name) + ": peer " + std::to_string(what.peer));
  }
  if (own->grouped.empty()) group_comms.emplace_back(comm, stream);
  own->grouped.push_back(what);
  return kNcclSuccess;
}

}  // namespace
}  // namespace overspill

using namespace overspill;

extern "C" {

void fake_nccl_set_enqueue(FakeNcclEnqueue enqueue) {
  const std::lock_guard lock(mutex);
  enqueue_hook = enqueue;
}
void fake_nccl_fail_rank(int rank) {
  const std::lock_guard lock(mutex);
  failing_rank = rank;
  if (rank < 0) return;
  last_text = "rank " + std::to_string(rank) + " was told to fail";
  for (auto& [key, comm] : comms) {
    if (comm->world->size > rank) comm->error = comm->rank == rank ? kSystemError : kRemoteError;
  }
  changed.notify_all();
}
int fake_nccl_live_communicators() {
  const std::lock_guard lock(mutex);
  return static_cast<int>(comms.size());
}

int ncclGetVersion(int* version) {
  *version = 22803;
  return kNcclSuccess;
}
int ncclGetUniqueId(NcclUniqueId* id) {
  const std::lock_guard lock(mutex);
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->bytes, sizeof id->bytes, "fake %llu", static_cast<unsigned long long>(++ids));
  return kNcclSuccess;
}
int ncclCommInitRankConfig(NcclComm** comm, int ranks, NcclUniqueId id, int rank,
                           NcclConfig* config) {
  const std::lock_guard lock(mutex);
  if (config->size != sizeof *config || config->magic != 0xcafebeef || config->blocking != 0) {
    return wrong(kInvalidArgument, "ncclCommInitRankConfig: a config that this fake does not know");
  }
  auto& world = worlds[id.bytes];
  if (!world) {
    world = std::make_shared<World>();
    world->size = ranks;
    world->ranks.resize(ranks);
    world->taken.resize(ranks);
  }
  if (world->size != ranks || rank < 0 || rank >= ranks || world->taken[rank]) {
    return wrong(kInvalidArgument, "ncclCommInitRankConfig: rank " + std::to_string(rank) + " of " +
                                       std::to_string(ranks) +
                                       " is out of range, taken, or of "
                                       "another number of ranks");
  }
  const auto own = std::make_shared<NcclComm>();
  own->world = world;
  own->rank = rank;
  own->polls = 1;
  world->ranks[rank] = own.get();
  world->taken[rank] = true;
  ++world->joined;
  comms[own.get()] = own;
  *comm = own.get();
  return kNcclInProgress;
}
int ncclCommGetAsyncError(NcclComm* comm, int* error) {
  const std::lock_guard lock(mutex);
  const auto found = comms.find(comm);
  if (found == comms.end()) {
    return wrong(kInvalidArgument, "ncclCommGetAsyncError on a communicator that is gone");
  }
  NcclComm& own = *found->second;
  if (own.polls > 0 && own.world->complete()) --own.polls;
  *error = own.error != 0 ? own.error : own.polls > 0 ? kNcclInProgress : kNcclSuccess;
  return kNcclSuccess;
}
int ncclCommFinalize(NcclComm* comm) {
  const std::lock_guard lock(mutex);
  int error = 0;
  const auto own = usable(comm, "ncclCommFinalize", error);
  if (!own) return error;
  own->polls = 1;
  return kNcclInProgress;
}
static int leave(NcclComm* comm, const char* name) {
  const std::lock_guard lock(mutex);
  const auto found = comms.find(comm);
  if (found == comms.end()) {
    return wrong(kInvalidArgument, std::string(name) + " on a communicator that is gone");
  }
  found->second->gone = true;
  found->second->world->ranks[found->second->rank] = nullptr;
  comms.erase(found);
  changed.notify_all();
  return kNcclSuccess;
}
int ncclCommDestroy(NcclComm* comm) { return leave(comm, "ncclCommDestroy"); }
int ncclCommAbort(NcclComm* comm) { return leave(comm, "ncclCommAbort"); }
const char* ncclGetErrorString(int result) {
  return result == kSystemError       ? "unhandled system error"
         : result == kInvalidArgument ? "invalid argument"
         : result == kInvalidUsage    ? "invalid usage"
         : result == kRemoteError     ? "remote process exited or there was a network error"
                                      : "no error";
}
const char* ncclGetLastError(NcclComm*) {
  static thread_local std::string text;
  const std::lock_guard lock(mutex);
  text = last_text;
  return text.c_str();
}

int ncclGroupStart() {
  ++group_depth;
  return kNcclSuccess;
}
int ncclGroupEnd() {
  const std::lock_guard lock(mutex);
  if (group_depth == 0) return wrong(kInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group_depth > 0) return kNcclSuccess;
  int result = kNcclSuccess;
  for (const auto& [comm, stream] : group_comms) {
    const auto found = comms.find(comm);
    if (found == comms.end()) continue;
    NcclComm& own = *found->second;
    Work work{.comm = found->second, .kind = FakeNcclKind::group, .call = own.next_call++};
    work.transfers = std::move(own.grouped);
    own.grouped.clear();
    work.signature = "a group of sends and receives";
    const int put_result = put(stream, std::move(work));
    if (result == kNcclSuccess) result = put_result;
  }
  group_comms.clear();
  return result;
}
int ncclSend(const void* from, size_t count, int type, int peer, NcclComm* comm, void* stream) {
  return transfer("ncclSend",
                  {.sends = true, .from = from, .count = count, .type = type, .peer = peer}, comm,
                  stream);
}
int ncclRecv(void* to, size_t count, int type, int peer, NcclComm* comm, void* stream) {
  return transfer("ncclRecv", {.to = to, .count = count, .type = type, .peer = peer}, comm, stream);
}
int ncclAllGather(const void* from, void* to, size_t count, int type, NcclComm* comm,
                  void* stream) {
  return collective("ncclAllGather", FakeNcclKind::all_gather, from, to, count, type, 0, comm,
                    stream);
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int, NcclComm* comm,
                      void* stream) {
  return collective("ncclReduceScatter", FakeNcclKind::reduce_scatter, from, to, count, type, 0,
                    comm, stream);
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int, NcclComm* comm,
                  void* stream) {
  return collective("ncclAllReduce", FakeNcclKind::all_reduce, from, to, count, type, 0, comm,
                    stream);
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, NcclComm* comm,
                  void* stream) {
  return collective("ncclBroadcast", FakeNcclKind::broadcast, from, to, count, type, root, comm,
                    stream);
}
}
