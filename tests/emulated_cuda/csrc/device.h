// The device for torch's core: the current device and stream, events, generators, hooks.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace emulated {

inline thread_local int the_device = 0;
inline thread_local std::map<int, size_t> the_streams;  // a device that is not there has its default stream

inline int current_device() { return the_device; }
inline StreamState& current_stream(int device) {
  auto& runtime = Runtime::get();
  auto& main = runtime.default_of(device);
  auto found = the_streams.find(device);
  return found == the_streams.end() ? main : *runtime.streams[found->second];
}
inline StreamState& current_stream() { return current_stream(the_device); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  static Device device(int index) { return Device(c10::DeviceType::CUDA, c10::DeviceIndex(index)); }
  static int index_of(Device device) { return device.index() < 0 ? the_device : device.index(); }
  Device exchangeDevice(Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }
  Device getDevice() const override { return device(the_device); }
  void setDevice(Device to) const override {
    TORCH_CHECK(to.index() < Runtime::get().num_devices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(to);
  }
  void uncheckedSetDevice(Device to) const noexcept override { the_device = index_of(to); }
  Stream getStream(Device of) const override {
    Guarded guard(lock());
    return Runtime::get().named(current_stream(index_of(of)));
  }
  Stream getDefaultStream(Device of) const override { return Stream(Stream::DEFAULT, device(index_of(of))); }
  Stream getNewStream(Device of, int) const override {
    Guarded guard(lock());
    Runtime::get().default_of(0);
    return Runtime::get().named(Runtime::get().add(index_of(of)));
  }
  Stream getStreamFromGlobalPool(Device of, bool) const override { return getNewStream(of, 0); }
  Stream exchangeStream(Stream to) const override {
    Guarded guard(lock());
    auto before = getStream(to.device());
    the_streams[to.device_index()] = Runtime::get().at(to).number;
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(Runtime::get().num_devices); }
  void record(void** event, const Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Guarded guard(lock());
    auto& state = Runtime::get().at(stream);
    delete static_cast<EventState*>(*event);
    state.clock.join(Runtime::get().host);
    *event = new EventState{state.device, state.clock};
  }
  void block(void* event, const Stream& stream) const override {
    Guarded guard(lock());
    if (event) Runtime::get().stream_waits(Runtime::get().at(stream), static_cast<EventState*>(event)->clock);
  }
  // The first answer is no, as it may be on a device; the second one waits.
  bool queryEvent(void* event) const override {
    Guarded guard(lock());
    auto* state = static_cast<EventState*>(event);
    if (!state || Runtime::get().host.covers(state->clock)) return true;
    if (!std::exchange(state->asked, true)) return false;
    synchronizeEvent(event);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  bool queryStream(const Stream& stream) const override {
    Guarded guard(lock());
    auto& state = Runtime::get().at(stream);
    if (Runtime::get().host.covers(state.clock)) return true;
    if (!std::exchange(asked_[state.number], true)) return false;
    asked_[state.number] = false;
    Runtime::get().host_waits(state.clock);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    Guarded guard(lock());
    Runtime::get().host_waits(Runtime::get().at(stream).clock);
  }
  void synchronizeEvent(void* event) const override {
    Guarded guard(lock());
    if (event) Runtime::get().host_waits(static_cast<EventState*>(event)->clock);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    Guarded guard(lock());
    Runtime::get().synchronize_device(index < 0 ? the_device : index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    Guarded guard(lock());
    if (auto* block = DeviceMemory::block_of(pointer)) block->recorded.insert(Runtime::get().at(stream).number);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto took = static_cast<EventState*>(to)->time - static_cast<EventState*>(from)->time;
    return std::chrono::duration<double, std::milli>(took).count();
  }

 private:
  mutable std::map<size_t, bool> asked_;
};

// A generator of the device that draws by one of the CPU.
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit Generator(int device, at::Generator from = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(Guard::device(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), cpu(std::move(from)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), cpu.clone()); }
  static const at::Generator& main(int device) {
    static auto* all = new std::vector<at::Generator>;
    while (int(all->size()) <= device) all->push_back(at::make_generator<Generator>(int(all->size())));
    return all->at(size_t(device));
  }
  // The generator that draws for a call on the current device.
  static at::Generator of(const std::optional<at::Generator>& asked) {
    const auto& found = asked.has_value() && asked->defined() ? *asked : main(the_device);
    TORCH_CHECK(found.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
    return static_cast<Generator*>(found.unsafeGetGeneratorImpl())->cpu;
  }
};

// torch creates this class by its name.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return Runtime::get().num_devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return Runtime::get().num_devices; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(Runtime::get().num_devices); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(the_device); }
  c10::DeviceIndex current_device() const override { return c10::DeviceIndex(the_device); }
  void setCurrentDevice(c10::DeviceIndex to) const override { exchangeDevice(to); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    TORCH_CHECK(to < Runtime::get().num_devices, "CUDA error: invalid device ordinal");
    return c10::DeviceIndex(to < 0 ? the_device : std::exchange(the_device, int(to)));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return exchangeDevice(to); }
  void deviceSynchronize(c10::DeviceIndex index) const override { Guard().synchronizeDevice(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::get(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &DeviceMemory::get(); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedMemory::get().find(pointer) != nullptr; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return Generator::main(index < 0 ? the_device : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? the_device : int(index));
  }
  c10::Device getDeviceFromPtr(void*) const override { return Guard::device(the_device); }
};

}  // namespace emulated
