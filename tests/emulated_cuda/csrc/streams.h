// Streams, events and what is known to be complete, as vector clocks.
//
// A kernel runs as soon as it is launched. Its stream's clock says what it was launched after; an access to memory that
// another stream may still use is an error (see memory.h). What the host may not see yet is deferred: see `Deferred`.
#pragma once
#include <Python.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace emulated {

inline std::recursive_mutex& lock() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}
// Who has the lock may wait for Python's, to free a tensor; so nobody waits for the lock and has Python's.
struct Guarded {
  std::recursive_mutex& mutex;
  explicit Guarded(std::recursive_mutex& mutex_) : mutex(mutex_) {
    if (mutex.try_lock()) return;
    auto* thread = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    mutex.lock();
    if (thread) PyEval_RestoreThread(thread);
  }
  ~Guarded() { mutex.unlock(); }
  Guarded(const Guarded&) = delete;
};

// For each stream, the number of its operations that came before.
struct Clock {
  std::vector<uint64_t> ticks;
  uint64_t of(size_t stream) const { return stream < ticks.size() ? ticks[stream] : 0; }
  void join(const Clock& other) {
    if (ticks.size() < other.ticks.size()) ticks.resize(other.ticks.size());
    for (size_t i = 0; i < other.ticks.size(); ++i) ticks[i] = std::max(ticks[i], other.ticks[i]);
  }
  bool covers(const Clock& other) const {
    for (size_t i = 0; i < other.ticks.size(); ++i)
      if (other.ticks[i] > of(i)) return false;
    return true;
  }
  void advance(size_t stream) {
    if (ticks.size() <= stream) ticks.resize(stream + 1);
    ++ticks[stream];
  }
};

// Work whose outcome is not there yet: a copy to pinned memory, a check of a copy's source, or a collective.
struct Deferred {
  uint64_t tick;
  bool for_host;  // the host alone waits for it; otherwise streams that wait for this one do too
  std::function<void()> finish;
  std::pair<char*, char*> pinned = {};  // the bytes of pinned memory that it reads or writes
  bool writes = false;
};

struct StreamState {
  size_t number;  // in the process
  int device;
  Clock clock;
  std::deque<Deferred> deferred;
};

struct Counters {
  uint64_t launches = 0, synchronizations = 0, read_bytes = 0, written_bytes = 0;
};

struct Runtime {
  int num_devices = 1;
  std::vector<std::unique_ptr<StreamState>> streams;
  Clock host;  // what the host has waited for
  std::string fault;  // found where nothing can be raised, such as in a destructor; raised by the next operation
  Counters counters;
  std::map<std::string, uint64_t> launches_of;
  int sync_debug = 0;
  std::function<void()> has_waited = [] {};

  static Runtime& get() {
    static auto* runtime = new Runtime;
    return *runtime;
  }
  // Stream 0 of each device is its default stream; stream ids of torch are these numbers, 0 for every default stream.
  StreamState& default_of(int device) {
    while (streams.size() < size_t(num_devices)) add(int(streams.size()));
    return *streams.at(device);
  }
  StreamState& add(int device) {
    streams.push_back(std::make_unique<StreamState>(StreamState{streams.size(), device, {}, {}}));
    return *streams.back();
  }
  StreamState& at(const c10::Stream& stream) {
    auto& main = default_of(stream.device_index());
    return stream.id() == 0 ? main : *streams.at(size_t(stream.id()));
  }
  c10::Stream named(const StreamState& state) {
    auto id = state.number < size_t(num_devices) ? 0 : c10::StreamId(state.number);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, c10::DeviceIndex(state.device)), id);
  }
  void raise_fault() {
    if (fault.empty()) return;
    std::string found;
    found.swap(fault);
    TORCH_CHECK(false, found);
  }
  // Begin an operation on a stream; it comes after everything that the host has waited for.
  void begin(StreamState& stream) {
    raise_fault();
    stream.clock.join(host);
    stream.clock.advance(stream.number);
  }
  void finish(const Clock& until, bool by_host) {
    for (size_t i = 0; i < streams.size(); ++i) {
      auto& queue = streams[i]->deferred;
      for (size_t at = 0; at < queue.size();) {
        if (queue[at].tick > until.of(i) || (queue[at].for_host && !by_host)) {
          ++at;
          continue;
        }
        auto work = std::move(queue[at]);
        queue.erase(queue.begin() + at);
        work.finish();
      }
    }
  }
  // Finish what comes before in the order of streams and writes these bytes; before a write, what reads them too.
  void finish_for(const Clock& until, std::pair<char*, char*> bytes, bool write) {
    for (size_t i = 0; i < streams.size(); ++i)
      for (auto& work : streams[i]->deferred) {
        bool overlap = work.pinned.first < bytes.second && bytes.first < work.pinned.second;
        if (overlap && (write || work.writes) && work.tick <= until.of(i)) std::exchange(work.finish, [] {})();
      }
  }
  void host_waits(Clock until) {
    ++counters.synchronizations;
    finish(until, true);
    host.join(until);
    has_waited();
    raise_fault();
  }
  void stream_waits(StreamState& stream, const Clock& until) {
    finish(until, false);
    stream.clock.join(until);
  }
  void synchronize_device(int device) {
    default_of(device);
    Clock all;
    for (auto& stream : streams)
      if (stream->device == device) all.join(stream->clock);
    host_waits(all);
  }
  // A synchronization that torch reports by `set_sync_debug_mode`: it hides in an operator.
  void implicit_wait(StreamState& stream) {
    TORCH_CHECK(sync_debug != 2, "called a synchronizing CUDA operation");
    if (sync_debug == 1) TORCH_WARN("called a synchronizing CUDA operation");
    host_waits(stream.clock);
  }
};

struct EventState {
  int device;
  Clock clock;
  bool asked = false;
  std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
};

}  // namespace emulated
