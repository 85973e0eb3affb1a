// Device memory: segments of shared host memory, cut into blocks as torch's caching allocator does; pinned memory.
#pragma once
#include <c10/core/Allocator.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "ledger.h"
#include "streams.h"

namespace emulated {

constexpr size_t MIB = size_t(1) << 20;

// The bytes of a tensor: runs of the same length, which `steps` repeats by a count, a stride apart, the smallest first.
struct Span {
  struct Step {
    int64_t count, stride;
    bool operator==(const Step&) const = default;
  };
  static constexpr size_t MAX_RUNS = 1 << 16;
  const char *begin, *end;
  int64_t run;
  std::vector<Step> steps = {};

  static Span whole(const char* begin, const char* end) { return {begin, end, end - begin}; }
  bool operator==(const Span&) const = default;

  size_t num_runs() const {
    size_t count = 1;
    for (auto& step : steps) count *= size_t(step.count);
    return count;
  }
  std::vector<const char*> runs() const {
    std::vector<const char*> all{begin};
    for (auto& step : steps)
      for (size_t i = 0, before = all.size(); i < before * size_t(step.count - 1); ++i)
        all.push_back(all[i] + step.stride);
    std::sort(all.begin(), all.end());
    return all;
  }
  // The bytes that it takes of each `period`, from its first one on, or more.
  int64_t length_in(int64_t period) const {
    int64_t length = run;
    for (auto& step : steps)
      if (step.stride % period) length += (step.count - 1) * step.stride;
    return length;
  }
  bool apart_in(const Span& other, int64_t period) const {
    int64_t ahead = ((other.begin - begin) % period + period) % period;
    return length_in(period) <= ahead && ahead + other.length_in(period) <= period;
  }
  // Exact, but for tensors of many runs and no common stride: then those between the first and last byte count.
  bool overlaps(const Span& other) const {
    if (end <= other.begin || other.end <= begin) return false;
    for (auto* one : {this, &other})
      for (auto& step : one->steps)
        if (apart_in(other, step.stride)) return false;
    if (num_runs() > MAX_RUNS || other.num_runs() > MAX_RUNS) return true;
    auto mine = runs(), others = other.runs();
    for (size_t i = 0, j = 0; i < mine.size() && j < others.size();) {
      if (mine[i] + run <= others[j]) ++i;
      else if (others[j] + other.run <= mine[i]) ++j;
      else return true;
    }
    return false;
  }
};

struct Access : Span {
  size_t stream;
  uint64_t tick;
  bool write;
  std::string by;
  bool freed = false;  // of an earlier owner of the memory
};

// A range of memory with the accesses that another stream may still have to wait for.
struct Tracked {
  char* base = nullptr;
  size_t size = 0;
  std::vector<Access> accesses;
  static constexpr size_t MAX_ACCESSES = 1000;  // beyond them, all from the first to the last byte counts

  void access(StreamState& stream, Span span, bool write, const std::string& by) {
    for (auto& before : accesses) {
      bool ordered = before.tick <= stream.clock.of(before.stream);
      TORCH_CHECK(
          !(write || before.write) || ordered || !before.overlaps(span),
          by, " on stream ", stream.number, write ? " writes" : " reads", " memory that ", before.by, " on stream ",
          before.stream, before.write ? " writes" : " reads",
          before.freed ? ", and which was freed meanwhile: record_stream, an event or wait_stream is missing"
                       : ", and nothing puts one after the other: an event or wait_stream is missing");
    }
    if (accesses.size() >= MAX_ACCESSES) span = Span::whole(span.begin, span.end);
    auto& host = Runtime::get().host;
    std::erase_if(accesses, [&](const Access& before) {
      if (before.tick <= host.of(before.stream)) return true;
      bool inside = span.begin <= before.begin && before.end <= span.end && (span.steps.empty() || span == before);
      return inside && (write || !before.write) && before.tick <= stream.clock.of(before.stream);
    });
    accesses.push_back({std::move(span), stream.number, stream.clock.of(stream.number), write, by});
  }
};

struct Segment;
struct Block : Tracked {
  size_t requested = 0;
  Segment* segment = nullptr;
  Block *before = nullptr, *after = nullptr;
  bool used = false;
  std::set<size_t> recorded;  // streams of record_stream
  int ipc_slot = -1;
};

// Memory of another process.
struct Imported : Tracked {
  void* mapping = nullptr;
  size_t mapping_size = 0;
  Handles::Slot* slot = nullptr;
  bool reading = false, writing = false;  // what this process has not waited for; a write is both
  static void release(void* context);
};

struct Pool;
struct Segment {
  int fd;
  char* base;
  size_t size;
  Pool* pool;
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    return a->size != b->size ? a->size < b->size : a->base < b->base;
  }
};
// Blocks go to the stream that they were allocated on.
struct Pool {
  int device;
  size_t stream;
  bool small;
  std::set<Block*, BySize> free;
};

struct Stat {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(int64_t amount) {
    current += amount;
    peak = std::max(peak, current);
    (amount > 0 ? allocated : freed) += std::abs(amount);
  }
};
struct Stats {
  std::map<std::string, Stat> of;  // "allocated_bytes.all" and so on
  int64_t num_ooms = 0, num_alloc_retries = 0;
  void add(const std::string& name, bool small, int64_t amount) {
    of[name + ".all"].add(amount);
    of[name + (small ? ".small_pool" : ".large_pool")].add(amount);
  }
};

int current_device();
StreamState& current_stream(int device);

struct DeviceMemory : c10::Allocator {
  std::map<std::tuple<int, size_t, bool>, Pool> pools;
  std::map<int, Stats> stats;
  std::set<Block*> shared;  // that other processes have handles to
  std::set<Imported*> imported;
  std::vector<Block*> waiting;  // freed, while a stream of record_stream may still use them
  std::vector<Block*> orphans;  // freed, but not given back yet
  std::mutex orphans_lock;
  size_t limit = 8ull << 30;

  static DeviceMemory& get() {
    static auto* memory = new DeviceMemory;
    return *memory;
  }
  // Processes do not see each other's streams: one has to wait for its own before another one may go on.
  void note(const c10::DataPtr& pointer, bool write, const std::string& by) {
    if (auto* block = block_of(pointer); block && block->ipc_slot >= 0) {
      auto& slot = Handles::get().table->slots[block->ipc_slot];
      TORCH_CHECK(!write || slot.readers == 0, by, " writes memory that another process may still use");
      TORCH_CHECK(slot.writers == 0, by, " reads memory that another process may still write");
      if (write) slot.unfinished = 1;
      slot.used_by_owner = 1;
      shared.insert(block);
    } else if (pointer.get_deleter() == &Imported::release) {
      auto* opened = static_cast<Imported*>(pointer.get_context());
      auto& slot = *opened->slot;
      TORCH_CHECK(slot.unfinished == 0, by, " uses memory of a process that has not waited for its own writes");
      int64_t readers = 0, writers = 0;  // that are this process
      for (auto* other : imported) {
        readers += other->slot == &slot && other->reading;
        writers += other->slot == &slot && other->writing;
      }
      TORCH_CHECK(slot.writers == writers, by, " uses memory that another process may still write");
      bool idle = slot.used_by_owner == 0 && slot.readers == readers;
      TORCH_CHECK(!write || idle, by, " writes memory that another process may still use");
      if (!std::exchange(opened->reading, true)) ++slot.readers;
      if (write && !std::exchange(opened->writing, true)) ++slot.writers;
    }
  }
  static bool waits(const Tracked& memory, bool writes_alone = false) {
    auto& host = Runtime::get().host;
    return std::any_of(memory.accesses.begin(), memory.accesses.end(), [&](const Access& access) {
      return access.tick > host.of(access.stream) && (access.write || !writes_alone);
    });
  }
  // What a block was used for before it had a handle counts as what comes after does.
  void see_unfinished(Block& block) {
    if (!waits(block)) return;
    auto& slot = Handles::get().table->slots[block.ipc_slot];
    slot.used_by_owner = 1;
    if (waits(block, true)) slot.unfinished = 1;
    shared.insert(&block);
  }
  void host_has_waited() {
    for (auto* block : std::exchange(shared, {})) {
      if (waits(*block)) shared.insert(block);
      if (block->ipc_slot < 0) continue;
      auto& slot = Handles::get().table->slots[block->ipc_slot];
      if (!waits(*block, true)) slot.unfinished = 0;
      if (!waits(*block)) slot.used_by_owner = 0;
    }
    for (auto* opened : imported) {
      if (opened->writing && !waits(*opened, true)) {
        opened->writing = false;
        --opened->slot->writers;
      }
      if (opened->reading && !waits(*opened)) {
        opened->reading = false;
        --opened->slot->readers;
      }
    }
  }
  static Block* block_of(const c10::DataPtr& pointer) {
    return pointer.get_deleter() == &DeviceMemory::release ? static_cast<Block*>(pointer.get_context()) : nullptr;
  }
  c10::DataPtr allocate(size_t size) override {
    auto device = c10::Device(c10::DeviceType::CUDA, c10::DeviceIndex(current_device()));
    if (size == 0) return {nullptr, nullptr, &release, device};
    Guarded guard(lock());
    auto* block = take(device.index(), current_stream(device.index()), size);
    return {block->base, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

  Block* take(int device, StreamState& stream, size_t requested) {
    size_t size = (requested + 511) / 512 * 512;
    bool small = size <= MIB;
    auto& pool = pools.try_emplace({device, stream.number, small}, Pool{device, stream.number, small, {}}).first->second;
    reclaim();
    Block key;
    key.size = size;
    auto found = pool.free.lower_bound(&key);
    auto* block = found == pool.free.end() ? grow(pool, size) : *found;
    pool.free.erase(block);
    if (size_t rest = block->size - size; small ? rest >= 512 : rest > MIB) {
      auto* tail = new Block;
      tail->base = block->base + size;
      tail->size = rest;
      tail->segment = block->segment;
      tail->accesses = block->accesses;
      link(block, tail, block->after);
      block->size = size;
      pool.free.insert(tail);
    }
    forget(*block);
    block->used = true;
    block->requested = requested;
    count(*block, 1);
    return block;
  }
  void count(const Block& block, int sign) {
    auto& pool = *block.segment->pool;
    auto& counted = stats[pool.device];
    for (auto name : {"allocation", "active"}) counted.add(name, pool.small, sign);
    for (auto name : {"allocated_bytes", "active_bytes"}) counted.add(name, pool.small, sign * int64_t(block.size));
    counted.add("requested_bytes", pool.small, sign * int64_t(block.requested));
  }
  static void link(Block* a, Block* b, Block* c) {
    b->before = a;
    b->after = c;
    a->after = b;
    if (c) c->before = b;
  }
  Block* grow(Pool& pool, size_t size) {
    size_t bytes = pool.small ? 2 * MIB : size < 10 * MIB ? 20 * MIB : (size + 2 * MIB - 1) / (2 * MIB) * 2 * MIB;
    if (!Ledger::get().claim(pool.device, bytes, limit)) {
      ++stats[pool.device].num_alloc_retries;
      empty_cache();
      if (!Ledger::get().claim(pool.device, bytes, limit)) {
        ++stats[pool.device].num_ooms;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size / MIB, " MiB. GPU ", pool.device,
            " has a total capacity of ", limit / MIB, " MiB of which ",
            (limit - std::min(limit, Ledger::get().used(pool.device))) / MIB, " MiB is free.");
      }
    }
    int fd = memfd_create("device memory", MFD_CLOEXEC);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, off_t(bytes)) == 0, "no shared memory for the emulated device");
    auto* base = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    TORCH_CHECK(base != MAP_FAILED, "no memory for the emulated device");
    auto* block = new Block;
    block->base = base;
    block->size = bytes;
    block->segment = new Segment{fd, base, bytes, &pool};
    stats[pool.device].add("reserved_bytes", pool.small, int64_t(bytes));
    stats[pool.device].add("segment", pool.small, 1);
    return block;
  }
  static void release(void* context) {
    if (!context) return;
    // Another thread may have the lock while it waits for a collective that this thread has to finish.
    std::lock_guard<std::mutex> guard(get().orphans_lock);
    get().orphans.push_back(static_cast<Block*>(context));
    if (!lock().try_lock()) return;
    for (auto* block : std::exchange(get().orphans, {})) get().give_back(block);
    lock().unlock();
  }
  // Drop the accesses that the block's own stream, or the host, comes after; what is next in the block does too.
  void forget(Block& block) {
    auto& runtime = Runtime::get();
    auto& own = *runtime.streams.at(block.segment->pool->stream);
    std::erase_if(block.accesses, [&](const Access& access) {
      bool outside = access.end <= block.base || block.base + block.size <= access.begin;
      return outside || access.tick <= std::max(own.clock.of(access.stream), runtime.host.of(access.stream));
    });
  }
  bool is_done(Block& block) {
    forget(block);
    return block.accesses.empty();
  }
  void give_back(Block* block) {
    if (block->ipc_slot >= 0 && Handles::get().in_use(block->ipc_slot)) {
      waiting.push_back(block);  // as torch does while another process has it open
      return;
    }
    if (!block->recorded.empty() && !is_done(*block)) {
      waiting.push_back(block);
      return;
    }
    free_now(block);
  }
  void reclaim() {
    {
      std::lock_guard<std::mutex> guard(orphans_lock);
      for (auto* block : std::exchange(orphans, {})) give_back(block);
    }
    std::vector<Block*> still;
    for (auto* block : std::exchange(waiting, {})) {
      bool open = block->ipc_slot >= 0 && Handles::get().in_use(block->ipc_slot);
      if (open || !is_done(*block)) still.push_back(block);
      else free_now(block);
    }
    waiting.insert(waiting.end(), still.begin(), still.end());
  }
  void free_now(Block* block) {
    shared.erase(block);
    if (block->ipc_slot >= 0) Handles::get().close(std::exchange(block->ipc_slot, -1));
    count(*block, -1);
    std::memset(block->base, 0xff, block->size);  // NaN in every floating dtype: who still reads it will notice
    block->used = false;
    block->recorded.clear();
    forget(*block);
    for (auto& access : block->accesses) access.freed = true;
    auto& pool = *block->segment->pool;
    for (auto* other : {block->before, block->after}) {
      if (!other || other->used) continue;
      pool.free.erase(other);
      if (other == block->before) std::swap(block, other);
      block->size += other->size;
      block->accesses.insert(block->accesses.end(), other->accesses.begin(), other->accesses.end());
      block->after = other->after;
      if (other->after) other->after->before = block;
      delete other;
    }
    pool.free.insert(block);
  }
  void empty_cache() {
    reclaim();
    for (auto& [_, pool] : pools) {
      std::erase_if(pool.free, [&](Block* block) {
        if (block->before || block->after) return false;
        auto* segment = block->segment;
        munmap(segment->base, segment->size);
        close(segment->fd);
        Ledger::get().claim(pool.device, -int64_t(segment->size), limit);
        stats[pool.device].add("reserved_bytes", pool.small, -int64_t(segment->size));
        stats[pool.device].add("segment", pool.small, -1);
        delete segment;
        delete block;
        return true;
      });
    }
  }
};

inline void Imported::release(void* context) {
  auto* memory = static_cast<Imported*>(context);
  Guarded guard(lock());
  DeviceMemory::get().imported.erase(memory);
  if (memory->reading) --memory->slot->readers;
  if (memory->writing) --memory->slot->writers;
  --memory->slot->users;
  munmap(memory->mapping, memory->mapping_size);
  delete memory;
}

// Pinned memory, by torch's allocator or by cudaHostRegister.
struct PinnedMemory : c10::Allocator {
  std::map<const char*, Tracked> ranges;
  Stat bytes;

  static PinnedMemory& get() {
    static auto* memory = new PinnedMemory;
    return *memory;
  }
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    auto* base = std::aligned_alloc(64, (size + 63) / 64 * 64);
    TORCH_CHECK(base, "no memory for pinned memory");
    add(base, size);
    return {base, base, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  static void release(void* base) {
    if (!base) return;
    get().remove(base);
    std::free(base);
  }
  void add(void* base, size_t size) {
    Guarded guard(lock());
    Tracked range;
    range.base = static_cast<char*>(base);
    range.size = size;
    ranges.insert_or_assign(range.base, range);
    bytes.add(int64_t(size));
  }
  bool remove(void* base) {
    Guarded guard(lock());
    auto found = ranges.find(static_cast<char*>(base));
    if (found == ranges.end()) return false;
    bytes.add(-int64_t(found->second.size));
    ranges.erase(found);
    return true;
  }
  Tracked* find(const void* pointer) {
    Guarded guard(lock());
    auto next = ranges.upper_bound(static_cast<const char*>(pointer));
    if (next == ranges.begin()) return nullptr;
    auto& range = std::prev(next)->second;
    return static_cast<const char*>(pointer) < range.base + range.size ? &range : nullptr;
  }
};

}  // namespace emulated
