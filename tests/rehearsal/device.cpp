// Device "rehearsal": tensors of torch's PrivateUse1 backend whose memory is the host's.
//
// Operators run in torch's kernels for the CPU, on aliases of the memory (`fallback`). As on CUDA, tensors of several
// devices in one operator raise. Reads of values on the host, waits, streams and events are reported to a listener.

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <torch/library.h>

#include <unordered_map>

namespace {

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

template <class... Options>
at::Tensor with_storage(const at::Tensor& like, Storage storage, c10::DispatchKeySet keys, Options... options) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(options..., std::move(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

// CPU tensors over the memory of those of the device, and back. Lives for one call.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    auto* original = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(original);
    if (found == storages_.end()) {
      auto* keep = new Storage(tensor.storage());
      c10::DataPtr memory(keep->mutable_data(), keep, [](void* it) { delete static_cast<Storage*>(it); }, DeviceType::CPU);
      Storage alias(Storage::use_byte_size_t(), keep->nbytes(), std::move(memory), c10::GetCPUAllocator(), true);
      found = storages_.emplace(original, alias).first;
    }
    index_ = tensor.device().index();
    auto alias = with_storage(tensor, found->second, c10::DispatchKeySet(DispatchKey::CPU));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors_.emplace_back(tensor, alias);
    return alias;
  }

  at::Tensor back(const at::Tensor& made) {
    if (!made.defined() || made.device().type() != DeviceType::CPU) return made;
    for (auto& [tensor, alias] : tensors_)
      if (alias.is_same(made)) return tensor;
    auto* storage = made.storage().unsafeGetStorageImpl();
    for (auto& [tensor, alias] : tensors_)  // a view is an inference tensor where its base is one
      if (alias.storage().unsafeGetStorageImpl() == storage)
        return with_storage(made, tensor.storage(), tensor.key_set(), c10::TensorImpl::VIEW);
    auto& own = made_[storage];
    if (!own)
      own = Storage(Storage::use_byte_size_t(), made.storage().nbytes(), adopted(made.storage(), index_), &device_allocator, true);
    return with_storage(made, own, c10::DispatchKeySet(DispatchKey::PrivateUse1));
  }

  // After the call: what it resized is resized on the device.
  void resized() {
    for (auto& [tensor, alias] : tensors_) {
      auto* original = tensor.storage().unsafeGetStorageImpl();
      if (alias.storage().data() != original->data() && alias.storage().nbytes() > original->nbytes()) {
        original->set_nbytes(alias.storage().nbytes());
        original->set_data_ptr_noswap(adopted(Storage(alias.storage()), tensor.device().index()));
      }
      if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
    }
  }

  DeviceIndex index_ = -1;

 private:
  std::unordered_map<c10::StorageImpl*, Storage> storages_, made_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
};

template <class Function>
void each_tensor(IValue& value, const Function& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = function(value.toTensor());
  } else if (value.isList() && value.type()->repr_str().find("Tensor") != std::string::npos) {
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) {
      IValue item = list.get(i);
      each_tensor(item, function);
      list.set(i, item);
    }
    value = list;
  }
}

// Operators whose result's shape, or whose result itself, the host has to know: on CUDA they wait for it.
const std::set<std::string> READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "unique_dim_consecutive", "repeat_interleave", "bincount", "multinomial", "_ctc_loss"};
const std::set<std::string> INDEXING = {"index", "_unsafe_index", "index_put_", "_index_put_impl_"};
void check_devices(const c10::OperatorHandle& op, const std::string& name, const torch::jit::Stack& arguments) {
  std::optional<at::Tensor> first;
  for (size_t place = 0; place < arguments.size(); ++place) {
    IValue value = arguments[place];
    const bool index = INDEXING.count(name) && place == 1;
    const auto* alias = op.schema().arguments()[place].alias_info();
    const bool written = alias && alias->isWrite();
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (index && on_device(tensor) && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte))
        report("read", name + " by a bool tensor");
      if (index && tensor.device().is_cpu()) {
        report("upload", name + " by a tensor of the host");
      } else if (written || !tensor.device().is_cpu() || tensor.dim() > 0) {  // a number of the host goes along
        if (!first) first = tensor;
        TORCH_CHECK(
            first->device() == tensor.device(), "Expected all tensors to be on the same device, but ",
            op.schema().name(), " got one of shape ", first->sizes(), " on ", first->device(), " and one of shape ",
            tensor.sizes(), " on ", tensor.device());
      }
      return tensor;
    });
  }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  std::string name = schema.name().substr(schema.name().find("::") + 2);
  auto inputs = torch::jit::last(*stack, schema.arguments().size()).vec();
  check_devices(op, name, inputs);
  if (READS.count(name)) report("read", name);

  Aliases aliases;
  auto arguments = inputs;
  for (size_t place = 0; place < arguments.size(); ++place) {
    auto& value = arguments[place];
    each_tensor(value, [&](const at::Tensor& tensor) { return aliases.of(tensor); });
    if (value.isDevice() && value.toDevice().type() == KIND) {
      aliases.index_ = Guard::index(value.toDevice());
      value = Device(DeviceType::CPU);
    }
  }
  for (size_t place = 0; place < arguments.size(); ++place) {
    const auto& type = *schema.arguments()[place].type();
    bool generator = type.str().find("Generator") != std::string::npos;
    if (generator) {
      const at::Generator& given =
          arguments[place].isNone() ? default_generator(aliases.index_) : arguments[place].toGenerator();
      TORCH_CHECK(given.device().type() == KIND, name, ": a generator of ", given.device(), " for tensors of rehearsal");
      arguments[place] = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->cpu;
    }
  }
  torch::jit::drop(*stack, inputs.size());
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  aliases.resized();
  const auto count = schema.returns().size();
  for (size_t place = stack->size() - count; place < stack->size(); ++place)
    each_tensor((*stack)[place], [&](const at::Tensor& made) { return aliases.back(made); });
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(KIND)));
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(KIND)));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  TORCH_CHECK(!from.is_meta() && !to.is_meta(), "cannot copy out of a meta tensor; no data");
  const bool up = !on_device(from), down = !on_device(to);
  const bool free = non_blocking && is_pinned((up ? from : to).storage().data());
  if (down && !free && to.numel()) report("read", non_blocking ? "copy to memory that is not pinned" : "copy to the host");
  if (up && !free && to.numel()) report("upload", non_blocking ? "copy from memory that is not pinned" : "copy from the host");
  Aliases aliases;
  aliases.of(to).copy_(aliases.of(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& set_storage(
    at::Tensor& self, Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  tensor->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    tensor->set_sizes_contiguous(size);
  } else {
    tensor->set_sizes_and_strides(size, stride);
  }
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, Storage storage) {
  const int64_t size = storage.nbytes() / self.element_size();
  return set_storage(self, std::move(storage), 0, {size}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage(self, Storage(Storage::use_byte_size_t(), 0, &device_allocator, true), 0, {0}, {1});
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  Aliases aliases;
  std::optional<at::Tensor> offset;
  if (bias && bias->defined()) offset = aliases.of(*bias);
  return aliases.back(at::convolution(
      aliases.of(input), aliases.of(weight), offset, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  Aliases aliases;
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [a, b, c] = at::convolution_backward(
      aliases.of(grad), aliases.of(input), aliases.of(weight), c10::IntArrayRef{channels}, stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {aliases.back(a), aliases.back(b), aliases.back(c)};
}

int64_t sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}

TORCH_LIBRARY(rehearsal, m) {
  m.def("devices() -> int", [] { return int64_t(DEVICES); });
  m.def("rng_state(int device) -> Tensor", [](int64_t device) {
    return at::Tensor::wrap_tensor_impl(default_generator(DeviceIndex(device)).unsafeGetGeneratorImpl()->get_state());
  });
  m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
    default_generator(DeviceIndex(device)).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
  });
  m.def("seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
    default_generator(DeviceIndex(device)).unsafeGetGeneratorImpl()->set_current_seed(seed);
  });
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {  // over gloo, with a process group that has it for CPU tensors
  for (const char* name : {"send", "recv_", "allreduce_", "broadcast_", "allgather_", "_allgather_base_",
                           "_reduce_scatter_base_", "alltoall_", "alltoall_base_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_OR_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_OR_DTYPE)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sdp_choice)
}

extern "C" void rehearsal_start(Listener call) {
  listener = call;
  static bool once = [] {
    c10::SetAllocator(KIND, &device_allocator);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
  }();
  (void)once;
}
