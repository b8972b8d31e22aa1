// Memory, streams, events and generators of the device "rehearsal" (see device.cpp).

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::DispatchKey, c10::IValue, c10::Storage, c10::Stream;
constexpr DeviceType KIND = DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;

using Listener = void (*)(const char* kind, const char* what);
std::atomic<Listener> listener{nullptr};

void report(const char* kind, const std::string& what) {
  if (Listener call = listener.load()) call(kind, what.c_str());
}

// ---------------------------------------------------------------------- memory

thread_local DeviceIndex current_device = 0;
std::mutex memory_mutex;
int64_t used[DEVICES], most_used[DEVICES];
std::set<std::pair<const char*, const char*>> pinned;  // [from, to)

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto next = pinned.upper_bound({static_cast<const char*>(pointer), reinterpret_cast<const char*>(~uintptr_t{0})});
  return next != pinned.begin() && pointer < (--next)->second;
}

void count(DeviceIndex device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  used[device] += bytes;
  most_used[device] = std::max(most_used[device], used[device]);
}

struct Block {  // memory of a device: its own, or that of a CPU tensor that an operator made
  void* own;
  Storage made;
  DeviceIndex device;
  int64_t bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  count(block->device, -block->bytes);
  std::free(block->own);
  delete block;
}

c10::DataPtr device_memory(size_t bytes, DeviceIndex device) {
  void* memory = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
  TORCH_CHECK(memory || !bytes, "rehearsal: no memory for ", bytes, " bytes");
  count(device, bytes);
  return {memory, new Block{memory, {}, device, int64_t(bytes)}, free_block, Device(KIND, device)};
}

c10::DataPtr adopted(Storage made, DeviceIndex device) {
  auto bytes = int64_t(made.nbytes());
  void* memory = made.mutable_data();
  count(device, bytes);
  return {memory, new Block{nullptr, std::move(made), device, bytes}, free_block, Device(KIND, device)};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return device_memory(bytes, current_device); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*each)[0].current = used[device];
      (*each)[0].peak = most_used[device];
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    most_used[device] = used[device];
  }
} device_allocator;

struct PinnedMemory final : c10::Allocator {
  static void release(void* memory) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    pinned.erase(pinned.lower_bound({static_cast<char*>(memory), nullptr}));
    std::free(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = static_cast<char*>(std::aligned_alloc(64, bytes / 64 * 64 + 64));
    std::lock_guard<std::mutex> lock(memory_mutex);
    pinned.insert({memory, memory + bytes + 1});
    return {memory, memory, release, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_allocator;

// ---------------------------------------------------------------------- streams, events, generators, hooks

thread_local c10::StreamId current_stream[DEVICES];
std::atomic<int64_t> streams{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return KIND; }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Device getDevice() const override { return {KIND, current_device}; }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "rehearsal: there is no device ", device);
    uncheckedSetDevice(device);
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  static DeviceIndex index(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static Stream stream(DeviceIndex device, c10::StreamId id) { return Stream(Stream::UNSAFE, Device(KIND, device), id); }
  Stream getStream(Device device) const override { return stream(index(device), current_stream[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(index(device), 0); }
  Stream getNewStream(Device device, int) const override {
    report("stream", "Stream");
    return stream(index(device), ++streams);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream next) const override {
    Stream before = getStream(next.device());
    current_stream[index(next.device())] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream) const override { return nullptr; }

  using Clock = std::chrono::steady_clock;
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) {
      report("event", "Event");
      *event = new Clock::time_point;
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { report("wait", "Stream.synchronize"); }
  void synchronizeEvent(void*) const override { report("wait", "Event.synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { report("wait", "synchronize"); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(
               *static_cast<Clock::time_point*>(to) - *static_cast<Clock::time_point*>(from))
        .count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator final : c10::GeneratorImpl {  // a CPU generator that says that it is the device's
  explicit Generator(DeviceIndex device, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(KIND, device), c10::DispatchKeySet(DispatchKey::PrivateUse1)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), cpu.clone()); }
  at::Generator cpu;
};

const at::Generator& default_generator(DeviceIndex device) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex index = 0; index < DEVICES; ++index) made.push_back(at::make_generator<Generator>(index));
    return made;
  }();
  return all.at(device < 0 ? current_device : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({KIND, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({KIND, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return at::make_generator<Generator>(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    auto memory = device_memory(bytes, storage.device().index());
    if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace
