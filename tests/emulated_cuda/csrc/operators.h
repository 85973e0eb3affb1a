// Operators: each runs on the CPU, on tensors of the CPU that share the device's memory.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorShape.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include "device.h"

namespace emulated {

using at::Tensor;

// The bytes between the first and the last element.
inline std::pair<char*, char*> extent(const Tensor& tensor) {
  auto* begin = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.itemsize();
  if (tensor.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * int64_t(tensor.itemsize())};
}

inline Span span(const Tensor& tensor) {
  auto [begin, end] = extent(tensor);
  Span out{begin, end, int64_t(tensor.itemsize())};
  std::vector<Span::Step> steps;
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (tensor.size(i) > 1) steps.push_back({tensor.size(i), tensor.stride(i) * int64_t(tensor.itemsize())});
  std::sort(steps.begin(), steps.end(), [](auto& a, auto& b) { return a.stride < b.stride; });
  for (auto& step : steps) {
    auto* inner = out.steps.empty() ? nullptr : &out.steps.back();
    if (!inner && step.stride <= out.run) out.run += (step.count - 1) * step.stride;
    else if (inner && step.stride == inner->count * inner->stride) inner->count *= step.count;
    else out.steps.push_back(step);
  }
  return out;
}

inline Tracked* tracked(const Tensor& tensor) {
  auto& pointer = tensor.storage().data_ptr();
  if (pointer.get_deleter() == &Imported::release) return static_cast<Imported*>(pointer.get_context());
  if (tensor.is_cuda()) return DeviceMemory::block_of(pointer);
  return PinnedMemory::get().find(tensor.storage().data());
}

// A launch on the current stream of a device: counts, and checks every access of it.
struct Launch {
  StreamState& stream;
  std::string name;
  Launch(int device, std::string name_) : stream(current_stream(device)), name(std::move(name_)) {
    Guarded guard(lock());
    Runtime::get().begin(stream);
    ++Runtime::get().counters.launches;
    ++Runtime::get().launches_of[name];
  }
  void access(const Tensor& tensor, bool write) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
    Guarded guard(lock());
    auto& counters = Runtime::get().counters;
    (write ? counters.written_bytes : counters.read_bytes) += tensor.nbytes();
    if (auto* memory = tracked(tensor)) memory->access(stream, span(tensor), write, name);
    if (tensor.is_cuda()) DeviceMemory::get().note(tensor.storage().data_ptr(), write, name);
  }
};

inline const c10::DispatchKeySet CUDA_KEYS(c10::DispatchKey::CUDA);

inline Tensor on_cpu(c10::Storage storage, const Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  tensor.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

// A tensor of the CPU over the same memory, which it holds; resizing it gives it memory of its own.
inline Tensor host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto* held = new c10::Storage(tensor.storage());
  c10::DataPtr pointer(
      held->mutable_data(), held, [](void* storage) { delete static_cast<c10::Storage*>(storage); },
      c10::Device(c10::DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), held->nbytes(), std::move(pointer), c10::GetCPUAllocator(), true);
  return on_cpu(std::move(storage), tensor);
}

inline Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &DeviceMemory::get(), CUDA_KEYS, c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &DeviceMemory::get(), CUDA_KEYS, c10::dtype_or_default(dtype));
}
inline Tensor new_like(const Tensor& found, int device) {
  auto strides = found.is_non_overlapping_and_dense() ? found.strides().vec() : found.contiguous().strides().vec();
  return empty_strided(found.sizes(), strides, found.scalar_type(), {}, Guard::device(device), {});
}

inline void resize_storage(c10::StorageImpl* storage, size_t size) {
  c10::DeviceGuard guard(storage->device());
  auto memory = DeviceMemory::get().allocate(size);
  auto copied = std::min(size, storage->nbytes());
  auto bytes = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)), CUDA_KEYS,
      caffe2::TypeMeta::Make<uint8_t>());
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({int64_t(copied)});
  std::optional<Launch> launch;
  if (copied) {
    launch.emplace(storage->device().index(), "resize");
    launch->access(bytes, false);
    std::memcpy(memory.get(), storage->data(), copied);
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(size);
  if (copied) launch->access(bytes, true);
}
inline const Tensor& resize_to(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == sizes && !format) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  size_t needed = self.numel() ? size_t(self.storage_offset() + self.numel()) * self.itemsize() : 0;
  if (needed > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  return self;
}

// Operators whose indices may be on the host, those that refuse even numbers of the host, whatever the overload and in
// place too, and those after which the host has to wait.
inline const std::set<std::string> TAKE_HOST_INDICES = {
    "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index.Tensor_out",
    "aten::index_put.out", "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put"};
inline const std::set<std::string> REFUSE_HOST_NUMBERS = {
    "aten::index_select", "aten::index_add", "aten::index_copy", "aten::gather", "aten::scatter", "aten::scatter_add",
    "aten::take", "aten::put", "aten::masked_scatter", "aten::addmm", "aten::addmv", "aten::addbmm", "aten::baddbmm"};
inline const std::set<std::string> SYNCHRONIZE = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
    "aten::bincount", "aten::equal", "aten::_linalg_check_errors"};

struct Call {
  struct Argument {
    Tensor device, host;
    const void* memory;
    bool write;
  };
  const c10::OperatorHandle& op;
  std::string name;
  int device = -1;
  bool synchronizes;
  std::vector<Argument> arguments;

  explicit Call(const c10::OperatorHandle& op_)
      : op(op_), name(toString(op_.operator_name())), synchronizes(SYNCHRONIZE.count(name) > 0) {}

  bool takes_from_host(const Tensor& tensor, bool write, const std::string& argument) const {
    if (tensor.device().is_meta()) return true;
    if (argument == "indices" && TAKE_HOST_INDICES.count(name)) return true;
    auto plain = name.substr(0, name.find('.'));
    if (plain.back() == '_') plain.pop_back();
    bool is_mask = argument == "mask" && plain == "aten::masked_fill";
    return tensor.dim() == 0 && !write && !is_mask && !REFUSE_HOST_NUMBERS.count(plain);
  }
  Tensor take(const Tensor& tensor, bool write, const std::string& argument) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(
          takes_from_host(tensor, write, argument),
          "Expected all tensors to be on the same device, but found at least two devices, cuda:", std::max(device, 0),
          " and ", tensor.device(), "! (", name, ")");
      return tensor;
    }
    int index = tensor.device().index();
    TORCH_CHECK(
        device < 0 || device == index, "Expected all tensors to be on the same device, but found at least two devices, ",
        "cuda:", device, " and cuda:", index, "! (", name, ")");
    device = index;
    auto alias = host(tensor);
    arguments.push_back({tensor, alias, alias.storage().data(), write});
    return alias;
  }
  void find_device(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda())
      device = device < 0 ? value.toTensor().device().index() : device;
    else if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector()) find_device(tensor);
    else if (value.isDevice() && device < 0)
      device = Guard::index_of(value.toDevice());
  }
  c10::IValue translate(const c10::Argument& declared, const c10::IValue& value) {
    bool write = declared.alias_info() && declared.alias_info()->isWrite();
    if (value.isTensor()) return take(value.toTensor(), write, declared.name());
    if (value.isTensorList()) {
      std::vector<Tensor> taken;
      for (const Tensor& tensor : value.toTensorVector()) taken.push_back(take(tensor, write, declared.name()));
      return taken;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> taken;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        taken.push_back(tensor ? std::make_optional(take(*tensor, write, declared.name())) : std::nullopt);
        synchronizes |= tensor && tensor->defined() && tensor->is_cuda() && tensor->scalar_type() == at::kBool;
      }
      return taken;
    }
    if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
    auto type = declared.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType)
      return Generator::of(value.isNone() ? std::nullopt : std::make_optional(value.toGenerator()));
    return value;
  }
  // The device's tensor for one that came back: an argument, a view of one, or a new one.
  Tensor give(const Tensor& found, Launch& launch) {
    if (!found.defined()) return found;
    for (auto& argument : arguments)
      if (found.is_same(argument.host)) return argument.device;
    for (auto& argument : arguments)
      if (found.storage().unsafeGetStorageImpl() == argument.host.storage().unsafeGetStorageImpl()) {
        auto view = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(argument.device.storage()), CUDA_KEYS, found.dtype());
        view.unsafeGetTensorImpl()->set_storage_offset(found.storage_offset());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(found.sizes(), found.strides());
        return view;
      }
    auto result = new_like(found, device);
    host(result).copy_(found);
    launch.access(result, true);
    return result;
  }
  // What an operator has resized gets memory of the device.
  void take_over_sizes(Launch& launch) {
    for (auto& [device_tensor, alias, memory, write] : arguments) {
      if (!write || (alias.storage().data() == memory && alias.sizes() == device_tensor.sizes())) continue;
      resize_to(device_tensor, alias.sizes(), {});
      device_tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
      if (alias.storage().data() != memory) host(device_tensor).copy_(alias);
      launch.access(device_tensor, true);
    }
  }
  void run(torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    auto begin = stack->size() - schema.arguments().size();
    for (size_t i = begin; i < stack->size(); ++i) find_device((*stack)[i]);
    if (device < 0) device = the_device;
    c10::DeviceGuard guard(Guard::device(device));
    for (size_t i = 0; i < schema.arguments().size(); ++i)
      (*stack)[begin + i] = translate(schema.arguments()[i], (*stack)[begin + i]);
    Launch launch(device, name);
    for (auto& argument : arguments) launch.access(argument.device, argument.write);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    take_over_sizes(launch);
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
      auto& value = (*stack)[i];
      if (value.isTensor()) {
        value = give(value.toTensor(), launch);
      } else if (value.isTensorList()) {
        std::vector<Tensor> given;
        for (const Tensor& tensor : value.toTensorVector()) given.push_back(give(tensor, launch));
        value = given;
      }
    }
    Guarded locked(lock());
    if (synchronizes) Runtime::get().implicit_wait(launch.stream);
  }
};

inline void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op).run(stack); }

// The source of a copy from pinned memory must not change until the host has waited for the copy.
inline uint64_t digest(const Tensor& tensor) {
  auto flat = tensor.contiguous();
  auto* bytes = static_cast<const char*>(flat.data_ptr());
  uint64_t sum = 14695981039346656037ull;
  for (size_t at = 0; at < flat.nbytes(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min<size_t>(8, flat.nbytes() - at));
    sum = (sum ^ word) * 1099511628211ull;
  }
  return sum;
}

inline void copy_between(const Tensor& to, const Tensor& from, bool non_blocking) {
  if (from.numel() == 0) return;
  bool to_host = !to.is_cuda(), from_host = !from.is_cuda();
  // From device to device it is work of the source's stream, and the streams of both wait for each other.
  int device = (from_host ? to : from).device().index();
  auto source = from.expand_as(to);
  auto& runtime = Runtime::get();
  auto meet = [&] {
    if (to_host || from_host || to.device() == from.device()) return;
    Guarded guard(lock());
    auto &one = current_stream(to.device().index()), &other = current_stream(from.device().index());
    runtime.stream_waits(one, other.clock);
    runtime.stream_waits(other, one.clock);
  };
  meet();
  Launch launch(device, to_host ? "copy to the host" : from_host ? "copy from the host" : "copy");
  launch.access(from, false);
  launch.access(to, true);
  if (to_host || from_host) {
    // Earlier copies into the same pinned memory have to be there, and those from it may no longer differ from it.
    Guarded guard(lock());
    runtime.finish_for(launch.stream.clock, extent(to_host ? to : from), to_host);
  }
  meet();
  bool pinned = (to_host || from_host) && tracked(to_host ? to : from);
  if (!(non_blocking && pinned)) {
    host(to).copy_(host(source));
    Guarded guard(lock());
    if ((to_host || from_host) && !(non_blocking && from_host)) runtime.implicit_wait(launch.stream);
    return;
  }
  Guarded guard(lock());
  auto tick = launch.stream.clock.of(launch.stream.number);
  if (to_host) {
    auto bytes = host(source).clone();
    auto [begin, end] = extent(to);
    if (to.is_non_overlapping_and_dense()) std::memset(begin, 0xff, size_t(end - begin));
    launch.stream.deferred.push_back({tick, true, [to, bytes] { to.copy_(bytes); }, {begin, end}, true});
  } else {
    host(to).copy_(source);
    launch.stream.deferred.push_back({tick, true, [from, before = digest(from)] {
      if (digest(from) != before && Runtime::get().fault.empty())
        Runtime::get().fault = "pinned memory was changed before a copy from it had ended: the host has to wait first";
    }, extent(from)});
  }
}

// Lists on one device are one launch; a list with tensors of the host is copied one by one.
inline void copy_lists(at::TensorList to, at::TensorList from, bool non_blocking) {
  auto together = [&](const Tensor& x) { return x.is_cuda() && x.device() == to[0].device(); };
  if (to.empty()) return;
  if (!std::all_of(to.begin(), to.end(), together) || !std::all_of(from.begin(), from.end(), together)) {
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
    return;
  }
  Launch launch(to[0].device().index(), "copies");
  for (size_t i = 0; i < to.size(); ++i) {
    launch.access(from[i], false);
    launch.access(to[i], true);
    host(to[i]).copy_(host(from[i]));
  }
}

}  // namespace emulated
