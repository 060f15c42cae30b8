// The kernels of the simulated GPU: every operator that torch has a CUDA kernel for computes by torch's CPU kernel, in
// the thread of the stream it was launched into. Its results exist at once, with their shapes (from torch's meta
// kernels) and not yet their values.
//
// Loaded by runtime.cpp into a process that uses the GPU.
#include "composed.h"
#include "kernels.h"
#include "runtime.h"

#include <ATen/AccumulateType.h>
#include <ATen/Context.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/rand.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ParallelGuard.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstring>
#include <iostream>
#include <mutex>
#include <random>
#include <set>

thread_local uint64_t seed_of_launch = 0;

namespace {

using c10::IValue;
using torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

const bool LAZY_LOADING = [] {
  const char* value = getenv("CUDA_MODULE_LOADING");
  return !value || std::string(value) != "EAGER";
}();

// Inside a kernel neither autograd nor Python's modes have a part in what is called.
struct BelowEverything {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard python{c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// A tensor in the memory of the host that is the memory of this one. It does not keep that memory: as on a GPU, what is
// freed is used again by what comes later in the same stream.
at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  if (tensor.is_sparse())
    return at::_sparse_coo_tensor_unsafe(host_view(tensor._indices()), host_view(tensor._values()), tensor.sizes(), {},
                                         tensor.is_coalesced());
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                   c10::DataPtr(tensor.storage().mutable_data(), c10::kCPU), nullptr, false),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

at::Tensor meta(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided, "only strided tensors have a shape alone");
  auto shape = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).pinned_memory(c10::nullopt));
  shape._set_conj(tensor.is_conj());
  shape._set_neg(tensor.is_neg());
  return shape;
}

// Apply a function to each tensor of an argument.
template <class Function>
IValue mapped(const IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& one : value.toTensorVector()) all.push_back(function(one));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
      all.push_back(one ? std::optional<at::Tensor>(function(*one)) : std::nullopt);
    return all;
  }
  return value;
}

Tensors tensors_of(const IValue& value) {
  Tensors all;
  mapped(value, [&](const at::Tensor& one) {
    if (one.defined()) all.push_back(one);
    return one;
  });
  return all;
}

// The one device of all arguments. Single numbers may be on the CPU, as everywhere in torch; indices too.
c10::Device device_of(const c10::OperatorHandle& op, c10::ArrayRef<IValue> args) {
  std::optional<c10::Device> device, other;
  for (const IValue& arg : args) {
    for (const at::Tensor& tensor : tensors_of(arg)) {
      if (tensor.is_cpu() && (tensor.dim() == 0 || op.schema().name().find("index") != std::string::npos)) continue;
      if (tensor.is_meta()) continue;
      auto& which = device && *device != tensor.device() ? other : device;
      which = tensor.device();
    }
    if (arg.isDevice() && !device) device = arg.toDevice();
  }
  if (other && device->is_cpu()) std::swap(device, other);
  TORCH_CHECK(!other, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
              " and ", *other, "! (when checking argument in method wrapper_CUDA_", op.schema().name(), ")");
  if (!device || !device->is_cuda()) return c10::Device(c10::kCUDA, c10::cuda::current_device());
  return device->has_index() ? *device : c10::Device(c10::kCUDA, c10::cuda::current_device());
}

// A seed from where the device's generator has come to, which moves on.
uint64_t next_seed(const IValue& given, c10::Device device) {
  static std::mutex lock;
  std::lock_guard<std::mutex> guard(lock);
  auto generator = given.isGenerator() ? given.toGenerator() : at::globalContext().defaultGenerator(device);
  uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 4);
  return generator.current_seed() * 0x9E3779B97F4A7C15ull + offset;
}

bool is_generator(const c10::Argument& arg) {
  auto type = arg.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// The arguments with every tensor replaced, and what names a device or a generator put right.
Stack replaced(const c10::OperatorHandle& op, c10::ArrayRef<IValue> args, c10::Device device, bool shapes_alone) {
  Stack all;
  for (size_t i = 0; i < args.size(); ++i) {
    if (is_generator(op.schema().arguments()[i]))
      all.push_back(shapes_alone ? IValue() : IValue(at::detail::createCPUGenerator(next_seed(args[i], device))));
    else if (args[i].isDevice())
      all.push_back(c10::Device(shapes_alone ? c10::kMeta : c10::kCPU));
    else
      all.push_back(mapped(args[i], [&](const at::Tensor& one) { return shapes_alone ? meta(one) : host_view(one); }));
  }
  return all;
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Where each result goes: into an argument that is written, or into memory of its own.
struct Results {
  std::vector<std::optional<size_t>> argument;
  explicit Results(const c10::FunctionSchema& schema) {
    for (const auto& result : schema.returns()) {
      argument.emplace_back();
      for (size_t i = 0; writes(result) && i < schema.arguments().size(); ++i)
        if (auto* info = schema.arguments()[i].alias_info(); info && *info == *result.alias_info()) argument.back() = i;
    }
  }
};

IValue on_device(const IValue& like, c10::Device device) {
  return mapped(like, [&](const at::Tensor& one) {
    return one.defined() ? at::empty_strided(one.sizes(), one.strides(), one.options().device(device).pinned_memory(c10::nullopt)) : one;
  });
}

void copy_all(const IValue& to, const IValue& from) {
  auto targets = tensors_of(to), sources = tensors_of(from);
  for (size_t i = 0; i < targets.size(); ++i)
    if (sources[i].numel()) targets[i].copy_(sources[i]);  // in evaluation the CPU's batch norm saves no statistics
}

// cuDNN's convolutions add in another order each time, unless they are told not to.
void disturb(const IValue& result) {
  static thread_local std::mt19937 random{std::random_device{}()};
  for (at::Tensor& tensor : tensors_of(result)) {
    double eps = tensor.scalar_type() == at::kDouble ? 4e-16 : tensor.scalar_type() == at::kFloat ? 2e-7 : 0;
    if (eps && tensor.numel()) tensor.mul_(at::rand(tensor.sizes(), at::detail::createCPUGenerator(random()), tensor.options()).sub_(0.5).mul_(eps).add_(1));
  }
}

bool deterministic() { return at::globalContext().deterministicCuDNN() || at::globalContext().deterministicAlgorithms(); }

// The first launch of a kernel loads it, and loading waits until the device is idle.
void load(const c10::OperatorHandle& op, c10::ArrayRef<IValue> args, c10::Device device) {
  static std::mutex lock;
  static std::set<std::pair<std::string, int>> loaded;
  int dtype = -1;
  if (op.schema().name() == "aten::_local_scalar_dense") return;  // a copy
  for (const IValue& arg : args)
    for (const at::Tensor& tensor : tensors_of(arg)) dtype = std::max(dtype, int(tensor.scalar_type()));
  {
    std::lock_guard<std::mutex> guard(lock);
    if (!loaded.emplace(toString(op.operator_name()), dtype).second) return;
  }
  if (LAZY_LOADING) wait_until_idle(device.index());
}

// Compute with the CPU's kernel, and in float32 what it has no kernel for in these types: CUDA's kernels take float16 and
// bfloat16 nearly everywhere, also beside float32, and add in float32; and its histograms are of whole numbers, too.
void call(const c10::OperatorHandle& op, Stack& stack) {
  const Stack args = stack;
  const bool counts = op.schema().name() == "aten::histc";
  const auto is_narrow = [counts](const at::Tensor& tensor) {
    return tensor.defined() && (c10::isReducedFloatingType(tensor.scalar_type()) || (counts && c10::isIntegralType(tensor.scalar_type(), false)));
  };
  const auto widened = [&](const at::Tensor& tensor) { return is_narrow(tensor) ? tensor.to(counts ? at::kDouble : at::kFloat) : tensor; };
  try {
    return op.callBoxed(&stack);
  } catch (const c10::Error&) {
    const auto narrow = [&](const IValue& arg) {
      auto all = tensors_of(arg);
      return std::any_of(all.begin(), all.end(), is_narrow);
    };
    if (std::none_of(args.begin(), args.end(), narrow)) throw;
  }
  Stack wide;
  for (const IValue& arg : args) wide.push_back(mapped(arg, widened));
  const Stack written = wide;
  op.callBoxed(&wide);
  for (size_t i = 0; i < args.size(); ++i)
    if (writes(op.schema().arguments()[i])) copy_all(args[i], written[i]);
  stack = std::move(wide);
}

void compute(const c10::OperatorHandle& op, Stack& stack, bool disturbed) {
  BelowEverything guard;
  c10::ParallelGuard serial(true);
  call(op, stack);
  if (disturbed) for (const IValue& result : stack) disturb(result);
}

void simulate(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const Stack args(stack->end() - count, stack->end());
  const c10::Device device = device_of(op, args);
  c10::cuda::CUDAGuard on(device);
  void* stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  BelowEverything below;
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "simulated GPU: ", op.operator_name(),
                              " is not simulated, as the CPU has no kernel for it");
  load(op, args, device);
  const Results results(schema);
  const bool attends = schema.name().rfind("aten::_scaled_dot_product", 0) == 0;
  const uint64_t seed = attends ? next_seed({}, device) : 0;
  const bool disturbed = schema.name() == "aten::convolution_backward" && !deterministic();
  Stack outputs;
  bool known = true;
  for (const auto& result : schema.returns())
    known &= attends || result.type()->kind() == c10::TypeKind::TensorType || result.type()->kind() == c10::TypeKind::ListType;
  if (known) {
    try {
      Stack shapes = replaced(op, args, device, true);
      const Stack before = shapes;
      op.callBoxed(&shapes);
      for (size_t i = 0; i < count; ++i) {  // what is written may have become larger
        if (!writes(schema.arguments()[i])) continue;
        auto targets = tensors_of(args[i]), wanted = tensors_of(before[i]);
        for (size_t k = 0; k < targets.size(); ++k)
          if (targets[k].sizes() != wanted[k].sizes()) targets[k].resize_(wanted[k].sizes());
      }
      for (size_t i = 0; i < results.argument.size(); ++i)
        outputs.push_back(results.argument[i] ? args[*results.argument[i]] : on_device(shapes[i], device));
    } catch (const std::exception& why) {
      if (getenv("PLAYGROUND_SIMULATED_GPU_LOG")) std::cerr << schema.name() << ": " << why.what() << std::endl;
      known = false;
    }
  }
  if (known) {
    auto targets = std::make_shared<Stack>();
    for (const IValue& output : outputs) targets->push_back(mapped(output, host_view));
    auto on_host = std::make_shared<Stack>(replaced(op, args, device, false));
    enqueue(stream, [op, on_host, targets, results, disturbed, seed] {
      try {
        BelowEverything guard;
        seed_of_launch = seed;
        compute(op, *on_host, disturbed);
        for (size_t i = 0; i < targets->size(); ++i)
          if (!results.argument[i]) copy_all((*targets)[i], (*on_host)[i]);
      } catch (const c10::NotImplementedError& error) {
        std::cerr << "simulated GPU: " << op.schema().name() << " is not simulated for these types: " << error.what_without_backtrace() << std::endl;
        abort();
      } catch (const c10::Error& error) {
        std::cerr << "simulated GPU: CUDA error: device-side assert triggered: " << op.schema().name() << ": "
                  << error.what_without_backtrace() << std::endl;
        abort();
      }
    });
  } else {  // the result's shape, or what is not a tensor, is known only when it has been computed
    c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
    Stack on_host = replaced(op, args, device, false);
    compute(op, on_host, disturbed);
    outputs.clear();
    for (size_t i = 0; i < on_host.size(); ++i) {
      if (results.argument[i]) {
        auto targets = tensors_of(args[*results.argument[i]]), made = tensors_of(on_host[i]);
        for (size_t k = 0; k < targets.size(); ++k) {
          if (targets[k].sizes() == made[k].sizes()) continue;
          targets[k].resize_(made[k].sizes());
          host_view(targets[k]).copy_(made[k]);
        }
        outputs.push_back(args[*results.argument[i]]);
      } else {
        outputs.push_back(on_device(on_host[i], device));
        copy_all(mapped(outputs.back(), host_view), on_host[i]);
      }
    }
  }
  torch::jit::drop(*stack, count);
  for (IValue& output : outputs) stack->push_back(std::move(output));
}

const int TRANSFER = 1000;  // microseconds in which the host goes on, and may read or write too early

// Copies: within the GPU, between GPUs, and between a GPU and the host, whose pageable memory is read or written before
// the call returns.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  BelowEverything below;
  at::Tensor from = source.expand_as(self);
  const c10::Device device = self.is_cuda() ? self.device() : from.device();
  auto stream = c10::cuda::getCurrentCUDAStream(from.is_cuda() ? from.device().index() : device.index());
  if (from.is_cuda() && self.is_cuda() && from.device() != self.device()) stream.synchronize();
  const bool host_goes_on = non_blocking && ((from.is_cpu() && from.is_pinned()) || (self.is_cpu() && self.is_pinned()));
  if (from.is_cpu() && !host_goes_on) from = source.clone().expand_as(self);
  const at::Tensor to = host_view(self), origin = host_view(from);
  if (from.is_cuda() && self.is_cuda() && from.device() != self.device()) stream = c10::cuda::getCurrentCUDAStream(self.device().index());
  const auto transfer = [to, origin, host_goes_on] {
    BelowEverything guard;
    c10::ParallelGuard serial(true);
    if (host_goes_on) usleep(TRANSFER);
    const_cast<at::Tensor&>(to).copy_(origin);
  };
  enqueue(stream.stream(), transfer, host_goes_on);
  if (self.is_cpu() && !host_goes_on) stream.synchronize();
  if (from.is_cuda() && self.is_cuda() && from.device() != self.device()) stream.synchronize();
  return self;
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Operators that allocate, or look at a tensor's form alone: torch's own do that on the simulated runtime.
bool stays(const c10::FunctionSchema& schema) {
  if (schema.name() == "aten::copy_" || composed().count(schema.name().substr(strlen("aten::")))) return true;
  static const std::set<std::string> names{
      "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream", "aten::is_pinned",
      "aten::_pin_memory", "aten::is_set_to", "aten::_efficientzerotensor", "aten::_resize_output_"};
  if (names.count(schema.name())) return true;
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;  // a view
  return false;
}

const bool installed = [] {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  // There is no cuDNN: what it computes has other names without it, among them cells of recurrent networks.
  at::globalContext().setSDPUseCuDNN(false);
  at::globalContext().setUserEnabledCuDNN(false);
  sleep_in_stream = [](long cycles) {
    enqueue(c10::cuda::getCurrentCUDAStream().stream(), [=] { usleep(cycles / 1000); }, true);
  };
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("copy_", &copy_);
  for (const auto& [name, implement] : composed()) implement(*library);
  library->impl("convolution", torch::CppFunction::makeFromBoxedFunction<&simulate>());
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || stays(op->schema())) continue;
    library->impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&simulate>());
  }
  return true;
}();

}  // namespace
