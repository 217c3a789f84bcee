// The scheduler of a block's threads. Compiled without instrumentation: to ThreadSanitizer only the
// orderings that CUDA promises exist.
#include "tests/emulation/block.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <utility>

#include "engine/base/random.h"
#include "tests/emulation/launches.h"

#if defined(OVERSPILL_EMULATION_ADDRESS)
#include <sanitizer/asan_interface.h>
#endif

namespace overspill::emulation {
namespace {

constexpr size_t kArenaBytes = 256 * 1024;
constexpr size_t kRedzone = 64;
constexpr size_t kOrderingBytes = 16 * (1 + kMaxWarps);
constexpr std::byte kPoison{0xff};  ///< NaN in every floating format
/// On average a warp's priority is drawn anew after so many switches.
constexpr uint64_t kSwitchesPerShuffle = 128;

thread_local Block* running = nullptr;

/// Accesses by kernels, to AddressSanitizer. Its macros are empty in a file that it does not watch.
void forbid([[maybe_unused]] const std::byte* bytes, [[maybe_unused]] size_t count) {
#if defined(OVERSPILL_EMULATION_ADDRESS)
  __asan_poison_memory_region(bytes, count);
#endif
}
void allow([[maybe_unused]] const std::byte* bytes, [[maybe_unused]] size_t count) {
#if defined(OVERSPILL_EMULATION_ADDRESS)
  __asan_unpoison_memory_region(bytes, count);
#endif
}

/// Not memset, which the sanitizers watch.
void poison(std::byte* bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) *const_cast<volatile std::byte*>(bytes + i) = kPoison;
}

}  // namespace

Block& current_block() { return *running; }

Block::Block() {
  void* memory = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  arena_ = static_cast<std::byte*>(memory);
}

Block::~Block() {
  allow(arena_, kArenaBytes);
  munmap(arena_, kArenaBytes);
  std::free(orderings_);
}

uint64_t Block::random(uint64_t bound) { return random_bits(seed_, draws_++) % bound; }

void Block::shuffle_warps() {
  for (unsigned i = (threads_ + kLanes - 1) / kLanes; i > 1; --i) {
    std::swap(order_[i - 1], order_[random(i)]);
  }
}

void Block::start(const Launch& launch, const uint3& index, uint64_t seed) {
  launch_ = &launch;
  block_index = index;
  block_extents = launch.block;
  grid_extents = launch.grid;
  threads_ = launch.block.x * launch.block.y * launch.block.z;
  done_ = waiting_ = barriers_ = 0;
  seed_ = seed;
  draws_ = 0;
  for (unsigned t = 0; t < threads_; ++t) thread_[t] = {};
  for (unsigned w = 0; w < threads_ / kLanes; ++w) {
    warps_[w].ready = ~uint32_t{0};
    warps_[w].arrived = warps_[w].done = warps_[w].generation = 0;
    order_[w] = w;
  }
  if (seed_ != 0) shuffle_warps();
  arrays_.clear();
  used_ = 0;
  if (fibers_are_threads()) {  // fresh objects and memory: no order between blocks
    std::free(orderings_);
    orderings_ = static_cast<char*>(std::malloc(kOrderingBytes));
    happens_before(orderings_);
    mmap(arena_, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
         0);
  }
  forbid(arena_, kArenaBytes);
  if (launch.shared_bytes > 0) shared(&launch, launch.shared_bytes);
}

void Block::run(const Launch& launch, const uint3& index, uint64_t seed) {
  Block* const outer = std::exchange(running, this);
  start(launch, index, seed);
  while (done_ < threads_) {
    const int thread = next_thread();
    if (thread < 0) report_deadlock();
    resume(static_cast<unsigned>(thread));
  }
  check_redzones();
  running = outer;
}

int Block::next_thread() {
  if (seed_ != 0 && random(kSwitchesPerShuffle) == 0) shuffle_warps();
  for (unsigned i = 0; i < threads_ / kLanes; ++i) {
    const uint32_t ready = warps_[order_[i]].ready;
    if (ready == 0) continue;
    const int from = seed_ == 0 ? 0 : static_cast<int>(random(kLanes));
    const int lane = (from + std::countr_zero(std::rotr(ready, from))) % static_cast<int>(kLanes);
    return static_cast<int>(order_[i] * kLanes) + lane;
  }
  return -1;
}

void Block::set_state(unsigned thread, State state) {
  thread_[thread].state = state;
  const uint32_t bit = uint32_t{1} << thread % kLanes;
  uint32_t& ready = warps_[thread / kLanes].ready;
  ready = state == State::ready ? ready | bit : ready & ~bit;
}

void Block::resume(unsigned thread) {
  Thread& t = thread_[thread];
  if (!t.started) {
    t.started = true;
    if (fibers_are_threads()) {
      t.fiber = thread;
    } else if (idle_count_ > 0) {
      t.fiber = idle_[--idle_count_];
    } else {
      t.fiber = static_cast<unsigned>(fibers_.size());
    }
    while (fibers_.size() <= t.fiber) fibers_.push_back(std::make_unique<Fiber>(thread_main));
  }
  current_ = thread;
  thread_index = {thread % block_extents.x, thread / block_extents.x % block_extents.y,
                  thread / (block_extents.x * block_extents.y)};
  fibers_[t.fiber]->resume(scheduler_);
}

void Block::thread_main() {
  Fiber::started(running->scheduler_);
  for (;;) {
    happens_after(launch_ordering());
    if (running->orderings_ != nullptr) happens_after(running->orderings_);
    running->launch_->body();
    happens_before(end_ordering());
    running->thread_done();
  }
}

void Block::thread_done() {
  Thread& t = thread_[current_];
  set_state(current_, State::done);
  ++done_;
  warps_[current_ / kLanes].done |= 1u << current_ % kLanes;
  release_block();
  if (!fibers_are_threads()) idle_[idle_count_++] = t.fiber;
  fibers_[t.fiber]->suspend(scheduler_);
}

void Block::wait(State state, const CallSite& site) {
  Thread& t = thread_[current_];
  set_state(current_, state);
  t.site = site;
  fibers_[t.fiber]->suspend(scheduler_);
}

void Block::release_block() {
  if (waiting_ == 0 || waiting_ + done_ < threads_) return;
  waiting_ = 0;
  ++barriers_;
  if (seed_ != 0) shuffle_warps();
  for (unsigned i = 0; i < threads_; ++i) {
    if (thread_[i].state == State::at_block_barrier) set_state(i, State::ready);
  }
}

void Block::barrier(const CallSite& site) {
  if (done_ > 0) report("a barrier after threads of the block have ended", site);
  if (waiting_ == 0) barrier_line_ = site.line;
  if (barrier_line_ != site.line) report("threads wait at different barriers", site);
  // Objects in turns: who comes to the next barrier before others have left this one is not in the
  // past of those.
  char* const ordering = orderings_ + barriers_ % 2 * 8;
  if (fibers_are_threads()) happens_before(ordering);
  ++waiting_;
  set_state(current_, State::at_block_barrier);
  thread_[current_].site = site;
  release_block();
  fibers_[thread_[current_].fiber]->suspend(scheduler_);
  if (fibers_are_threads()) happens_after(ordering);
}

void Block::wait_for_warp(const CallSite& site, bool memory_order) {
  const unsigned w = current_ / kLanes;
  Warp& warp = warps_[w];
  if (warp.done != 0) report("an exchange after lanes of the warp have ended", site);
  char* const ordering = orderings_ + 16 * (1 + w) + warp.generation % 2 * 8;
  if (memory_order && fibers_are_threads()) happens_before(ordering);
  warp.arrived |= 1u << current_ % kLanes;
  if (warp.arrived == ~0u) {
    warp.arrived = 0;
    ++warp.generation;
    for (unsigned l = 0; l < kLanes; ++l) {
      const unsigned lane = w * kLanes + l;
      if (thread_[lane].state == State::at_warp_barrier) set_state(lane, State::ready);
    }
  } else {
    wait(State::at_warp_barrier, site);
  }
  if (memory_order && fibers_are_threads()) happens_after(ordering);
}

void Block::warp_barrier(const CallSite& site) { wait_for_warp(site, true); }

uint64_t Block::exchange(uint64_t value, unsigned mask, const CallSite& site) {
  Warp& warp = warps_[current_ / kLanes];
  const unsigned lane = current_ % kLanes;
  // A lane may be one exchange ahead of another, never two.
  auto& slots = warp.slots[warp.generation % 2];
  slots[lane] = value;
  wait_for_warp(site, false);
  return slots[lane ^ mask];
}

uint32_t Block::ballot(bool condition, const CallSite& site) {
  Warp& warp = warps_[current_ / kLanes];
  auto& slots = warp.slots[warp.generation % 2];
  slots[current_ % kLanes] = condition ? 1 : 0;
  wait_for_warp(site, false);
  uint32_t bits = 0;
  for (unsigned l = 0; l < kLanes; ++l) bits |= static_cast<uint32_t>(slots[l]) << l;
  return bits;
}

std::byte* Block::shared(const void* key, size_t bytes) {
  for (const SharedArray& array : arrays_) {
    if (array.key == key) return arena_ + array.offset;
  }
  const size_t offset = used_;
  const size_t end = (offset + bytes + kRedzone + 15) / 16 * 16;
  size_t total = bytes;
  for (const SharedArray& array : arrays_) total += array.bytes;
  if (total > kSharedLimit) {
    report(fmt::format("{} bytes of shared memory, of {}", total, kSharedLimit), {});
  }
  if (end > kArenaBytes) std::abort();
  allow(arena_ + offset, bytes);
  poison(arena_ + offset, end - offset);
  arrays_.push_back({key, offset, bytes});
  used_ = end;
  return arena_ + offset;
}

void Block::check_redzones() {
  for (const SharedArray& array : arrays_) {
    for (size_t i = 0; i < kRedzone; ++i) {
      if (arena_[array.offset + array.bytes + i] == kPoison) continue;
      report(fmt::format("a write beyond a shared array of {} bytes", array.bytes), {});
      break;
    }
  }
}

void Block::report(const std::string& what, const CallSite& site) const {
  add_error(fmt::format("{} at {}:{}, block {},{},{} thread {},{},{}", what, site.file, site.line,
                        block_index.x, block_index.y, block_index.z, thread_index.x, thread_index.y,
                        thread_index.z));
}

void Block::report_deadlock() const {
  for (unsigned t = 0; t < threads_; ++t) {
    if (thread_[t].state == State::done) continue;
    std::fprintf(
        stderr,
        "kernel emulation: deadlock: thread %u of block %u,%u,%u waits at %s:%d for others "
        "that never come\n",
        t, block_index.x, block_index.y, block_index.z, thread_[t].site.file, thread_[t].site.line);
    break;
  }
  std::abort();  // its fibers cannot be unwound
}

}  // namespace overspill::emulation
