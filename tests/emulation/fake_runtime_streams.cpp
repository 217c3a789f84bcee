// Streams, points of their work, and what ThreadSanitizer sees of both.
#include <cstdio>
#include <cstdlib>

#include "tests/emulation/fake_runtime_state.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreSyncBegin(const char*, int);
void AnnotateIgnoreSyncEnd(const char*, int);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
void __tsan_read_range(void*, unsigned long);
void __tsan_write_range(void*, unsigned long);
}
#endif

namespace overspill::fake_cuda {

#if defined(__SANITIZE_THREAD__)
Quiet::Quiet() {
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
Quiet::~Quiet() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
}
void publish(void* key) { __tsan_release(key); }
void receive(void* key) { __tsan_acquire(key); }
void note_read(const void* begin, size_t bytes) {
  __tsan_read_range(const_cast<void*>(begin), bytes);
}
void note_write(void* begin, size_t bytes) { __tsan_write_range(begin, bytes); }
#else
Quiet::Quiet() = default;
Quiet::~Quiet() = default;
void publish(void*) {}
void receive(void*) {}
void note_read(const void*, size_t) {}
void note_write(void*, size_t) {}
#endif

namespace {

/// Null when the stream ends.
std::unique_ptr<Work> next_work(CUstream_st& stream) {
  const Quiet quiet;
  std::unique_lock lock(world().mutex);
  world().changed.wait(lock, [&] { return stream.closing || !stream.queue.empty(); });
  if (stream.queue.empty()) return nullptr;
  std::unique_ptr<Work> work = std::move(stream.queue.front());
  stream.queue.pop_front();
  return work;
}

void pause(CUstream_st& stream) {
  std::chrono::microseconds time{};
  {
    const Quiet quiet;
    const std::lock_guard lock(world().mutex);
    const unsigned most = world().settings.max_delay_us;
    if (most == 0) return;
    time = std::chrono::microseconds(stream.random() % most * stream.slowness);
  }
  std::this_thread::sleep_for(time);
}

/// Whether the device can still work.
bool begin_work(CUstream_st& stream) {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  DeviceState& device = world().devices[stream.device];
  if (device.breaks_with != cudaSuccess && device.breaks_after-- == 0) {
    device.sticky = std::exchange(device.breaks_with, cudaSuccess);
  }
  if (device.sticky != cudaSuccess) return false;
  if (world().running++ == 0) protect(true);
  return true;
}

void end_work(std::unique_ptr<Work> work, bool began) {
  publish(work->point.get());
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  if (began && --world().running == 0) protect(false);
  work->point->done = true;
  work->point->at = std::chrono::steady_clock::now();
  world().changed.notify_all();
  work.reset();
}

void do_work(CUstream_st& stream) {
  while (std::unique_ptr<Work> work = next_work(stream)) {
    receive(work.get());
    pause(stream);
    const bool began = begin_work(stream);
    if (began) work->run();
    end_work(std::move(work), began);
  }
}

}  // namespace

PointPtr put(CUstream_st* stream, std::function<void()> run) {
  std::unique_ptr<Work> work;
  PointPtr point;
  {
    const Quiet quiet;
    point = std::make_shared<Point>();
    work = std::make_unique<Work>(Work{std::move(run), point});
  }
  publish(work.get());
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  stream->last = point;
  stream->queue.push_back(std::move(work));
  world().changed.notify_all();
  return point;
}

void wait_for(PointPtr point) {
  {
    const Quiet quiet;
    std::unique_lock lock(world().mutex);
    world().changed.wait(lock, [&] { return point->done; });
  }
  receive(point.get());
  const Quiet quiet;
  point.reset();
}

}  // namespace overspill::fake_cuda

CUstream_st::CUstream_st(int device, uint64_t seed)
    : device(device), random(seed), slowness(1u << random() % 4) {
  thread = std::thread([this] { overspill::fake_cuda::do_work(*this); });
}

CUstream_st::~CUstream_st() {
  {
    const overspill::fake_cuda::Quiet quiet;
    const std::lock_guard lock(overspill::fake_cuda::world().mutex);
    closing = true;
    overspill::fake_cuda::world().changed.notify_all();
  }
  thread.join();
  const overspill::fake_cuda::Quiet quiet;
  last.reset();
}
