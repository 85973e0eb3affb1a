// Memory of one process that another one opens: a handle is a line of text, its lifetime a slot of the owner's table.
#pragma once
#include <sstream>

#include "operators.h"

namespace emulated {

inline std::string share(const Tensor& tensor) {
  Guarded guard(lock());
  auto* block = DeviceMemory::block_of(tensor.storage().data_ptr());
  TORCH_CHECK(block, "CUDA error: invalid argument: memory that another process owns cannot be shared again");
  auto& memory = DeviceMemory::get();
  auto& handles = Handles::get();
  if (block->ipc_slot < 0) block->ipc_slot = handles.open_slot();
  auto& slot = handles.table->slots[block->ipc_slot];
  ++slot.users;  // the receiver to be
  memory.see_unfinished(*block);
  std::ostringstream out;
  out << getpid() << " " << block->segment->fd << " " << block->segment->size << " " << handles.fd << " "
      << block->ipc_slot << " " << slot.generation << " " << (block->base - block->segment->base) << " "
      << tensor.storage().nbytes() << " " << Ledger::get().physical(tensor.device().index());
  return out.str();
}

struct Handle {
  int pid, segment_fd, handles_fd, slot, device;
  int64_t generation;
  size_t segment_size, offset, size;

  explicit Handle(const std::string& text) {
    std::istringstream in(text);
    in >> pid >> segment_fd >> segment_size >> handles_fd >> slot >> generation >> offset >> size >> device;
    TORCH_CHECK(in, "CUDA error: invalid resource handle");
  }
  static void* map(int pid, int number, size_t size) {
    int fd = open(("/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number)).c_str(), O_RDWR | O_CLOEXEC);
    TORCH_CHECK(fd >= 0, "CUDA error: invalid resource handle: the process that owned the memory has ended");
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    TORCH_CHECK(at != MAP_FAILED, "CUDA error: mapping of buffer object failed");
    return at;
  }
  Handles::Slot& find_slot() const {
    static std::map<std::pair<int, int>, Handles::Table*> tables;
    auto& table = tables[{pid, handles_fd}];
    if (!table) table = static_cast<Handles::Table*>(map(pid, handles_fd, sizeof(Handles::Table)));
    auto& found = table->slots[slot];
    TORCH_CHECK(found.generation == generation, "CUDA error: invalid resource handle: its memory was freed");
    return found;
  }
};

inline Tensor open_handle(const std::string& text) {
  Guarded guard(lock());
  Handle handle(text);
  TORCH_CHECK(handle.pid != getpid(), "CUDA error: invalid device context: a process cannot open its own handle");
  auto& slot = handle.find_slot();
  auto& devices = Ledger::get().devices;
  auto found = std::find(devices.begin(), devices.end(), handle.device);
  TORCH_CHECK(found != devices.end(), "CUDA error: invalid device ordinal: the memory is on a device not seen here");
  auto* imported = new Imported;
  imported->mapping = Handle::map(handle.pid, handle.segment_fd, handle.segment_size);
  imported->mapping_size = handle.segment_size;
  imported->base = static_cast<char*>(imported->mapping) + handle.offset;
  imported->size = handle.size;
  imported->slot = &slot;
  DeviceMemory::get().imported.insert(imported);
  auto device = Guard::device(int(found - devices.begin()));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), handle.size, {imported->base, imported, &Imported::release, device}, nullptr, false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), CUDA_KEYS, caffe2::TypeMeta::Make<uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({int64_t(handle.size)});
  return tensor;
}

inline void release_handle(const std::string& text) { --Handle(text).find_slot().users; }

}  // namespace emulated
