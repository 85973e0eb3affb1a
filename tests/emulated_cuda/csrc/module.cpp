// The extension: one translation unit, because torch's headers are most of what the compiler reads.
#include <torch/csrc/utils/pybind.h>

#include "ipc.h"
#include "kernels.h"
#include "nccl.h"

namespace emulated {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &DeviceMemory::get());
}  // namespace emulated
using emulated::CUDAHooks;
using at::CUDAHooksRegistry;
using at::CUDAHooksArgs;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&emulated::run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) { emulated::register_operators(m); }

namespace py = pybind11;
using namespace emulated;

static py::dict stats_of(int device) {
  Guarded guard(lock());
  auto& stats = DeviceMemory::get().stats[device];
  py::dict out;
  for (auto name : {"allocation", "segment", "active", "allocated_bytes", "reserved_bytes", "active_bytes",
                    "requested_bytes", "inactive_split", "inactive_split_bytes"}) {
    py::dict pools;
    for (auto pool : {"all", "small_pool", "large_pool"}) {
      auto& stat = stats.of[std::string(name) + "." + pool];
      py::dict one;
      one["current"] = stat.current;
      one["peak"] = stat.peak;
      one["allocated"] = stat.allocated;
      one["freed"] = stat.freed;
      pools[pool] = one;
    }
    out[name] = pools;
  }
  out["num_ooms"] = stats.num_ooms;
  out["num_alloc_retries"] = stats.num_alloc_retries;
  return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [](std::vector<int> physical, size_t limit) {
    Runtime::get().num_devices = int(physical.size());
    Ledger::get().devices = physical;
    DeviceMemory::get().limit = limit;
    Runtime::get().has_waited = [] { DeviceMemory::get().host_has_waited(); };
    rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;  // a segment is a file
    setrlimit(RLIMIT_NOFILE, &files);
  });
  m.def("device_count", [] { return Runtime::get().num_devices; });
  m.def("get_device", [] { return the_device; });
  m.def("exchange_device", [](int device) { return int(Guard().exchangeDevice(Guard::device(device)).index()); });
  m.def("current_stream", [](int device) {
    auto stream = Guard().getStream(Guard::device(device));
    return std::make_tuple(stream.id(), int(stream.device_index()), int(stream.device_type()));
  });
  m.def("set_stream", [](int64_t id, int device) {
    Guard().setDevice(Guard::device(device));
    Guard().exchangeStream(c10::Stream(c10::Stream::UNSAFE, Guard::device(device), id));
  });
  m.def("synchronize", [] { Guard().synchronizeDevice(-1); }, py::call_guard<py::gil_scoped_release>());
  m.def("default_generator", [](int device) { return Generator::main(device); });
  m.def("memory_stats", stats_of);
  m.def("reset_peaks", [](int device) {
    Guarded guard(lock());
    for (auto& [_, stat] : DeviceMemory::get().stats[device].of) stat.peak = stat.current;
  });
  m.def("empty_cache", [] {
    Guarded guard(lock());
    DeviceMemory::get().empty_cache();
  });
  m.def("mem_get_info", [](int device) {
    auto limit = DeviceMemory::get().limit, used = Ledger::get().used(device);
    return std::make_tuple(limit - std::min(limit, used), limit);
  });
  m.def("set_sync_debug", [](int mode) { Runtime::get().sync_debug = mode; });
  m.def("get_sync_debug", [] { return Runtime::get().sync_debug; });
  m.def("pinned_bytes", [] { return std::make_tuple(PinnedMemory::get().bytes.current, PinnedMemory::get().bytes.peak); });
  m.def("pin", [](uintptr_t base, size_t size) { PinnedMemory::get().add(reinterpret_cast<void*>(base), size); });
  m.def("unpin", [](uintptr_t base) { return PinnedMemory::get().remove(reinterpret_cast<void*>(base)); });
  m.def("resize_storage", [](const Tensor& tensor, size_t size) {
    resize_storage(tensor.storage().unsafeGetStorageImpl(), size);
  });
  m.def("host", [](const Tensor& tensor) { return host(tensor); });
  m.def("define_nccl", [m]() mutable {
    py::module_::import("torch._C._distributed_c10d");
    py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(m, "Nccl")
        .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>());
  });
  m.def("share", [](const Tensor& tensor) { return py::bytes(share(tensor)); });
  m.def("open_handle", open_handle);
  m.def("release_handle", release_handle);
  m.def("triton_launch", [](const std::string& name, const std::vector<Tensor>& tensors) {
    Launch launch(the_device, name);
    for (auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_cuda(), "Pointer argument of ", name, " cannot be accessed from Triton (cpu tensor?)");
      TORCH_CHECK(tensor.device().index() == the_device, "CUDA error: an illegal memory access was encountered: ", name,
                  " runs on cuda:", the_device, ", but its memory is on ", tensor.device());
      launch.access(tensor, true);  // which of them it writes is not known
    }
  });
  m.def("counters", [] {
    Guarded guard(lock());
    auto& all = Runtime::get().counters;
    return std::make_tuple(all.launches, all.synchronizations, all.read_bytes, all.written_bytes,
                           Runtime::get().launches_of);
  });
}
