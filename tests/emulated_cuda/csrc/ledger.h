// What processes share: the bytes that each has taken of each device, and handles to memory that others may open.
#pragma once
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <string>
#include <vector>

namespace emulated {

// A page of shared memory by a path.
template <typename T>
T* mapped(const std::string& path, int flags) {
  int fd = open(path.c_str(), flags | O_CLOEXEC, 0600);
  TORCH_CHECK(fd >= 0 && (!(flags & O_CREAT) || ftruncate(fd, sizeof(T)) == 0), "cannot open ", path);
  void* at = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  TORCH_CHECK(at != MAP_FAILED, "cannot map ", path);
  return static_cast<T*>(at);
}

// The file of EMULATED_CUDA_LEDGER, with a row for each process that is alive.
struct Ledger {
  static constexpr int MAX_PROCESSES = 256, MAX_DEVICES = 16;
  struct Row {
    int pid;
    int64_t bytes[MAX_DEVICES];
  };
  struct Table {
    Row rows[MAX_PROCESSES];
  };
  std::string path = std::getenv("EMULATED_CUDA_LEDGER");
  Table* table = mapped<Table>(path, O_RDWR | O_CREAT);
  int lock_fd = open(path.c_str(), O_RDWR | O_CLOEXEC);

  std::vector<int> devices;  // what this process calls 0, 1, ... by the machine's numbers

  int physical(int device) const { return devices.at(size_t(device)); }
  static Ledger& get() {
    static auto* ledger = new Ledger;
    return *ledger;
  }
  static bool alive(int pid) { return pid && (kill(pid, 0) == 0 || errno == EPERM); }
  size_t used(int device) const {
    int64_t sum = 0;
    for (auto& row : table->rows)
      if (alive(row.pid)) sum += row.bytes[physical(device)];
    return size_t(sum);
  }
  bool claim(int device, int64_t bytes, size_t limit) {
    flock(lock_fd, LOCK_EX);
    bool fits = int64_t(used(device)) + bytes <= int64_t(limit);
    if (fits) row().bytes[physical(device)] += bytes;
    flock(lock_fd, LOCK_UN);
    return fits;
  }

 private:
  Row& row() {
    Row* free = nullptr;
    for (auto& row : table->rows) {
      if (row.pid == getpid()) return row;
      if (!free && !alive(row.pid)) free = &row;
    }
    TORCH_CHECK(free, "too many processes use the emulated device");
    *free = Row{getpid(), {}};
    return *free;
  }
};

// The handles that this process has given away. A slot counts the processes that have it open or are about to, and
// those that have not waited for their reads or writes (`readers`) or for their writes (`writers`).
struct Handles {
  static constexpr int MAX_SLOTS = 65536;
  struct Slot {
    std::atomic<int64_t> generation, users, readers, writers;
    std::atomic<int64_t> unfinished, used_by_owner;  // its owner has not waited for writes, for reads or writes
  };
  struct Table {
    Slot slots[MAX_SLOTS];
  };
  int fd = memfd_create("handles", MFD_CLOEXEC);
  Table* table = nullptr;
  int64_t last_generation = 0;

  Handles() {
    TORCH_CHECK(fd >= 0 && ftruncate(fd, sizeof(Table)) == 0, "no shared memory for handles");
    table = static_cast<Table*>(mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  }
  static Handles& get() {
    static auto* handles = new Handles;
    return *handles;
  }
  int open_slot() {
    for (int i = 0; i < MAX_SLOTS; ++i)
      if (table->slots[i].generation == 0) {
        auto& slot = table->slots[i];
        slot.users = slot.readers = slot.writers = slot.unfinished = slot.used_by_owner = 0;
        table->slots[i].generation = ++last_generation;
        return i;
      }
    TORCH_CHECK(false, "too many handles");
  }
  bool in_use(int slot) const { return table->slots[slot].users > 0; }
  void close(int slot) { table->slots[slot].generation = 0; }
};

}  // namespace emulated
