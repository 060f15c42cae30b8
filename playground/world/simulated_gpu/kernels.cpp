// The kernels of the simulated GPU: every operator that torch has a CUDA kernel for computes by torch's CPU kernel, in
// the thread of the stream it was launched into. Its results exist at once, with their shapes (from torch's meta
// kernels) and not yet their values.
//
// Loaded by runtime.cpp into a process that uses the GPU.
#include "arguments.h"
#include "composed.h"
#include "kernels.h"
#include "ranges.h"
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

#include <atomic>
#include <iostream>
#include <mutex>
#include <random>
#include <set>

thread_local uint64_t seed_of_launch = 0;

namespace {

using torch::jit::Stack;

const bool LAZY_LOADING = [] {
  const char* value = getenv("CUDA_MODULE_LOADING");
  return !value || std::string(value) != "EAGER";
}();

// Inside a kernel neither autograd nor Python's modes have a part in what is called.
struct BelowEverything {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard python{c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// What a stream does is done in any thread, whatever that one is about: it computes as a thread of its own would.
struct AsInItsOwnThread {
  c10::impl::ForceDispatchKeyGuard keys{c10::default_included_set, c10::default_excluded_set};
  BelowEverything below;
  c10::ParallelGuard serial{true};
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard warnings{&silent};
};

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
enum class By { shape, values, values_that_may_grow };

Stack replaced(const c10::OperatorHandle& op, c10::ArrayRef<IValue> args, c10::Device device, By what) {
  const bool shapes_alone = what == By::shape;
  Stack all;
  for (size_t i = 0; i < args.size(); ++i) {
    if (is_generator(op.schema().arguments()[i]))
      all.push_back(shapes_alone ? IValue() : IValue(at::detail::createCPUGenerator(next_seed(args[i], device))));
    else if (args[i].isDevice())
      all.push_back(c10::Device(shapes_alone ? c10::kMeta : c10::kCPU));
    else
      all.push_back(mapped(args[i], [&](const at::Tensor& one) {
        if (shapes_alone) return meta(one);
        return one.defined() && one.is_cpu() ? taken_along(one) : host_view(one, what == By::values_that_may_grow);
      }));
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

// What an operator reads, and writes: of its arguments, and of its results those that are no argument.
Operation operation_of(const c10::OperatorHandle& op, c10::ArrayRef<IValue> args, const Stack& outputs, const Results& results, Tensors& tensors) {
  Operation operation{op.schema().name().c_str(), {}, [&tensors](size_t number) { return described(tensors[number]); }};
  for (size_t i = 0; i < args.size(); ++i)
    for (const at::Tensor& tensor : tensors_of(args[i])) add_access(operation, tensors, tensor, writes(op.schema().arguments()[i]), false);
  for (size_t i = 0; i < outputs.size(); ++i)
    if (!results.argument[i])
      for (const at::Tensor& tensor : tensors_of(outputs[i])) add_access(operation, tensors, tensor, true, true);
  return operation;
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
  static std::set<std::pair<const c10::FunctionSchema*, int>> loaded;
  int dtype = -1;
  if (op.schema().name() == "aten::_local_scalar_dense") return;  // a copy
  for (const IValue& arg : args)
    for (const at::Tensor& tensor : tensors_of(arg)) dtype = std::max(dtype, int(tensor.scalar_type()));
  {
    std::lock_guard<std::mutex> guard(lock);
    if (!loaded.emplace(&op.schema(), dtype).second) return;
  }
  if (LAZY_LOADING) wait_until_loadable(device.index());
}

// The type in which to compute what the CPU has no kernel for in this one: CUDA's kernels take float16 and bfloat16 nearly
// everywhere, also beside float32, and add in float32; their Fourier transforms take float16, their histograms whole numbers,
// their absolute value and trace what is true or false.
std::optional<c10::ScalarType> wider(c10::ScalarType type, const std::string& op) {
  if (c10::isReducedFloatingType(type)) return at::kFloat;
  if (type == at::kComplexHalf) return at::kComplexFloat;
  if (op == "aten::histc" && c10::isIntegralType(type, false)) return at::kDouble;
  if ((op == "aten::abs" || op == "aten::trace") && type == at::kBool) return at::kByte;
  return {};
}

// And the type of the result, where torch's meta kernel has not said it.
c10::ScalarType narrower(c10::ScalarType made, c10::ScalarType given, const std::string& op) {
  const bool is_half = given == at::kHalf || given == at::kComplexHalf;
  if (made == at::kComplexFloat && is_half) return at::kComplexHalf;
  if (made == at::kFloat && given == at::kComplexHalf) return at::kHalf;
  return wider(given, op) == made ? given : made;
}

// CUDA's softmax computes from float16 to float32, and its gradient back, in one: here the type changes before or after.
void separate_conversion(const c10::FunctionSchema& schema, Stack& stack) {
  for (size_t i = 0; i < stack.size(); ++i) {
    const std::string& name = schema.arguments()[i].name();
    if (name == "half_to_float" && stack[i].toBool()) {
      stack[0] = stack[0].toTensor().to(at::kFloat);
      stack[i] = false;
    } else if (name == "input_dtype") {
      stack[i] = stack[0].toTensor().scalar_type();
    }
  }
}

// Compute with the CPU's kernel.
void call(const c10::OperatorHandle& op, Stack& stack, bool types_known) {
  separate_conversion(op.schema(), stack);
  const Stack args = stack;
  const std::string& name = op.schema().name();
  std::optional<c10::ScalarType> given;
  const auto widened = [&](const at::Tensor& tensor) {
    auto type = tensor.defined() ? wider(tensor.scalar_type(), name) : std::nullopt;
    if (type) given = tensor.scalar_type();
    return type ? tensor.to(*type) : tensor;
  };
  std::exception_ptr said;
  try {
    return op.callBoxed(&stack);
  } catch (const c10::Error&) {
    said = std::current_exception();
  }
  Stack wide;
  for (const IValue& arg : args) wide.push_back(mapped(arg, widened));
  if (!given) std::rethrow_exception(said);
  const Stack written = wide;
  op.callBoxed(&wide);
  for (size_t i = 0; i < args.size(); ++i)
    if (writes(op.schema().arguments()[i])) copy_all(args[i], written[i]);
  stack.clear();
  for (const IValue& result : wide)
    stack.push_back(mapped(result, [&](const at::Tensor& one) {
      return one.defined() && !types_known ? one.to(narrower(one.scalar_type(), *given, name)) : one;
    }));
}

void compute(const c10::OperatorHandle& op, Stack& stack, bool disturbed, bool types_known) {
  AsInItsOwnThread guard;
  call(op, stack, types_known);
  if (disturbed) for (const IValue& result : stack) disturb(result);
}

torch::Library* take_over(const std::string& name_space, c10::DispatchKey key);

// torchvision's operators are there when it has been imported, which may be later.
void take_over_torchvision() {
  static std::atomic<bool> done = false;
  if (done || !c10::Dispatcher::singleton().findSchema({"torchvision::nms", ""}) || done.exchange(true)) return;
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  take_over("torchvision", c10::DispatchKey::CUDA);
}

// Whose results are of another form on the CPU than on a GPU, or than torch's meta kernels say: it is known when they have
// been computed.
const std::set<std::string> FORMS_OF_THE_CPU{"aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::quantize_per_tensor",
                                             "aten::quantize_per_channel", "aten::quantize_per_tensor_dynamic",
                                             "aten::_native_multi_head_attention"};

void simulate(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  take_over_torchvision();
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const Stack args(stack->end() - count, stack->end());
  const c10::Device device = device_of(op, args);
  c10::cuda::CUDAGuard on(device);
  void* stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  BelowEverything below;
  const bool has_kernel = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) || op.hasComputedKernelForDispatchKey(c10::DispatchKey::SparseCPU) ||
                          op.hasComputedKernelForDispatchKey(c10::DispatchKey::NestedTensorCPU);
  TORCH_CHECK_NOT_IMPLEMENTED(has_kernel, "simulated GPU: ", op.operator_name(),
                              " is not simulated, as the CPU has no kernel for it");
  load(op, args, device);
  const Results results(schema);
  const bool attends = schema.name().rfind("aten::_scaled_dot_product", 0) == 0;
  const uint64_t seed = attends ? next_seed({}, device) : 0;
  const bool disturbed = schema.name() == "aten::convolution_backward" && !deterministic();
  Stack outputs;
  bool known = true;
  for (const auto& result : schema.returns())
    known &= !FORMS_OF_THE_CPU.count(schema.name()) && (attends || result.type()->kind() == c10::TypeKind::TensorType || result.type()->kind() == c10::TypeKind::ListType);
  if (known) {
    try {
      Stack shapes = replaced(op, args, device, By::shape);
      const Stack before = shapes;
      op.callBoxed(&shapes);
      for (size_t i = 0; i < count; ++i) {  // what is written may have become larger
        if (!writes(schema.arguments()[i])) continue;
        auto targets = tensors_of(args[i]), wanted = tensors_of(before[i]);
        for (size_t k = 0; k < targets.size(); ++k)
          if (targets[k].sizes() != wanted[k].sizes()) targets[k].resize_(wanted[k].sizes());
      }
      for (size_t i = 0; i < results.argument.size(); ++i)
        outputs.push_back(results.argument[i] ? args[*results.argument[i]] : all_on_device(shapes[i], device));
    } catch (const std::exception& why) {
      if (getenv("PLAYGROUND_SIMULATED_GPU_LOG")) std::cerr << schema.name() << ": " << why.what() << std::endl;
      known = false;
    }
  }
  if (known) {
    auto targets = std::make_shared<Stack>();
    for (const IValue& output : outputs) targets->push_back(mapped(output, values_of));
    auto on_host = std::make_shared<Stack>(replaced(op, args, device, By::values));
    Tensors tensors;
    const auto work = [op, on_host, targets, results, disturbed, seed] {
      try {
        AsInItsOwnThread guard;
        seed_of_launch = seed;
        compute(op, *on_host, disturbed, true);
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
    };
    enqueue(stream, work, operation_of(op, args, outputs, results, tensors));
  } else {  // the result's shape, or what is not a tensor, is known only when it has been computed
    Tensors tensors;
    enqueue(stream, [] {}, operation_of(op, args, {}, results, tensors));
    c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
    Stack on_host = replaced(op, args, device, By::values_that_may_grow);
    compute(op, on_host, disturbed, false);
    outputs.clear();
    for (size_t i = 0; i < on_host.size(); ++i) {
      if (results.argument[i]) {
        auto targets = tensors_of(args[*results.argument[i]]), made = tensors_of(on_host[i]);
        for (size_t k = 0; k < targets.size(); ++k) {
          if (has_parts(made[k])) {
            auto there = on_device(made[k], device);
            copy_values(values_of(there), made[k]);
            targets[k].copy_(there);
            continue;
          }
          if (targets[k].sizes() == made[k].sizes()) continue;
          targets[k].resize_(made[k].sizes());
          values_of(targets[k]).copy_(made[k]);
        }
        outputs.push_back(args[*results.argument[i]]);
      } else {
        outputs.push_back(all_on_device(on_host[i], device));
        copy_all(mapped(outputs.back(), values_of), on_host[i]);
      }
    }
  }
  torch::jit::drop(*stack, count);
  for (IValue& output : outputs) stack->push_back(std::move(output));
}

// Have a stream wait for one of another device, as torch does before it copies between GPUs, and after.
void order(c10::cuda::CUDAStream first, c10::cuda::CUDAStream second) {
  c10::cuda::CUDAGuard on(first.device());
  cudaEvent_t event;
  cudaEventCreate(&event);
  cudaEventRecord(event, first.stream());
  on.set_device(second.device());
  cudaStreamWaitEvent(second.stream(), event, 0);
  cudaEventDestroy(event);
}

const size_t STAGED = 64 << 10;  // bytes of pageable memory that are read before the call returns, and copied later

// Copies: within the GPU, between GPUs, and between a GPU and the host, which goes on where torch lets it: its memory is
// pinned, or was read before the call returns.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  take_over_torchvision();
  BelowEverything below;
  at::Tensor from = source.expand_as(self);
  const c10::Device device = from.is_cuda() ? from.device() : self.device();
  c10::cuda::CUDAGuard on(device);
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  const auto others = c10::cuda::getCurrentCUDAStream(self.is_cuda() ? self.device().index() : device.index());
  const at::Tensor& host = self.is_cpu() ? self : source;
  const bool is_pinned = non_blocking && host.is_cpu() && !has_parts(host) && host.is_pinned();
  const bool waits = host.is_cpu() && !is_pinned && !(non_blocking && source.is_cpu());
  if (host.is_cpu() && !is_pinned && !waits) {
    if (source.nbytes() > STAGED) stream.synchronize();
    from = source.clone().expand_as(self);
  }
  Tensors tensors;
  Operation operation{"aten::copy_", {}, [&tensors](size_t number) { return described(tensors[number]); }};
  add_access(operation, tensors, source, false, false, is_pinned);
  add_access(operation, tensors, self, true, false, is_pinned);
  const bool is_kept = is_pinned && keep_until_copied(host, stream);
  const auto view = [&](const at::Tensor& tensor) { return tensor.is_cuda() || is_kept ? same_memory(tensor, false) : at::alias(tensor); };
  const at::Tensor to = view(self), origin = view(from);
  if (others != stream) order(others, stream);
  enqueue(stream.stream(), [to, origin] {
    AsInItsOwnThread guard;
    const_cast<at::Tensor&>(to).copy_(origin);
  }, operation);
  if (others != stream) order(stream, others);
  if (waits) stream.synchronize();
  return self;
}

// Operators that allocate, or look at a tensor's form alone: torch's own do that on the simulated runtime.
bool stays(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const std::string name = toString(op.operator_name());
  if (schema.name() == "aten::copy_" || composed().count(name.substr(name.find("::") + 2))) return true;
  static const std::set<std::string> names{
      "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream", "aten::is_pinned",
      "aten::_pin_memory", "aten::is_set_to", "aten::_efficientzerotensor", "aten::_resize_output_", "aten::is_coalesced", "aten::_nnz",
      "aten::sparse_dim", "aten::dense_dim", "aten::_dimI", "aten::_dimV", "aten::_coalesced_", "aten::sparse_resize_",
      "aten::sparse_resize_and_clear_", "aten::_sparse_coo_tensor_with_dims", "aten::_sparse_coo_tensor_with_dims_and_tensors",
      "aten::copy_sparse_to_sparse_", "aten::_nested_tensor_size", "aten::_nested_tensor_strides", "aten::_nested_tensor_storage_offsets",
      "aten::is_same_size"};
  if (names.count(schema.name())) return true;
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;  // a view
  return false;
}

// What calls kernels of CUDA itself, or would compute a convolution as cuDNN does: torch has no kernel of it for a key.
const char* const WITHOUT_KERNELS[]{"convolution", "ldexp.Tensor", "ldexp.out"};

// Simulate the operators of a namespace that have kernels for a GPU.
torch::Library* take_over(const std::string& name_space, c10::DispatchKey key) {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto* library = new torch::Library(torch::Library::IMPL, name_space, key, __FILE__, __LINE__);  // for good
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(key)) {
    if (name.name.rfind(name_space + "::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || stays(*op)) continue;
    library->impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&simulate>());
  }
  return library;
}

const bool installed = [] {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  // There is no cuDNN: what it computes has other names without it, among them cells of recurrent networks.
  at::globalContext().setSDPUseCuDNN(false);
  at::globalContext().setUserEnabledCuDNN(false);
  sleep_in_stream = [](long cycles) {
    enqueue(c10::cuda::getCurrentCUDAStream().stream(), [=] { usleep(cycles / 1000); });
  };
  auto* library = take_over("aten", c10::DispatchKey::CUDA);
  library->impl("copy_", &copy_);
  for (const auto& [name, implement] : composed()) implement(*library);
  for (const char* name : WITHOUT_KERNELS) library->impl(name, torch::CppFunction::makeFromBoxedFunction<&simulate>());
  take_over("aten", c10::DispatchKey::SparseCUDA);
  take_over("aten", c10::DispatchKey::NestedTensorCUDA);
  return true;
}();

}  // namespace
