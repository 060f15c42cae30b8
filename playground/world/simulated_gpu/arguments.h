// The tensors among an operator's arguments: where the host finds them, their shapes alone, and memory for results.
#pragma once
#include <ATen/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/_nested_view_from_buffer.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

using c10::IValue;

// A tensor of several parts, each changed: a sparse one is its indices and values, a nested one a buffer.
template <class Function>
at::Tensor by_parts(const at::Tensor& tensor, Function function) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.is_sparse() || tensor.is_nested(), "simulated GPU: of sparse tensors only those in COO are simulated");
  if (tensor.is_nested())
    return at::_nested_view_from_buffer(function(tensor.values()), tensor._nested_tensor_size(), tensor._nested_tensor_strides(),
                                        tensor._nested_tensor_storage_offsets());
  return at::_sparse_coo_tensor_unsafe(function(tensor._indices()), function(tensor._values()), tensor.sizes(), {}, tensor.is_coalesced());
}

inline bool has_parts(const at::Tensor& tensor) { return tensor.layout() != c10::kStrided || tensor.is_nested(); }

// A tensor of the CPU in the memory of this one. It does not keep that memory: as on a GPU, what is freed is used again by
// what comes later in the same stream. One that may grow gets memory elsewhere when it does.
inline at::Tensor same_memory(const at::Tensor& tensor, bool may_grow) {
  if (has_parts(tensor)) return by_parts(tensor, [](const at::Tensor& part) { return same_memory(part, false); });
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                   c10::DataPtr(tensor.storage().mutable_data(), c10::kCPU), may_grow ? c10::GetCPUAllocator() : nullptr, may_grow),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  host.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  host.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

inline at::Tensor host_view(const at::Tensor& tensor, bool may_grow) {
  return tensor.defined() && tensor.is_cuda() ? same_memory(tensor, may_grow) : tensor;
}

inline at::Tensor values_of(const at::Tensor& tensor) { return host_view(tensor, false); }

// What the thread of a stream destroys has no object of Python: it would wait for the GIL, and who holds that may wait for
// the stream. So it gets a copy of a tensor of the CPU, as a kernel gets a number.
inline at::Tensor taken_along(const at::Tensor& tensor) {
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

inline at::Tensor meta(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  TORCH_CHECK_NOT_IMPLEMENTED(!has_parts(tensor), "only strided tensors have a shape alone");
  auto shape = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).pinned_memory(c10::nullopt));
  shape._set_conj(tensor.is_conj());
  shape._set_neg(tensor.is_neg());
  return shape;
}

// Apply a function to each tensor of an argument.
template <class Function>
inline IValue mapped(const IValue& value, Function function) {
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

inline std::vector<at::Tensor> tensors_of(const IValue& value) {
  std::vector<at::Tensor> all;
  mapped(value, [&](const at::Tensor& one) {
    if (one.defined()) all.push_back(one);
    return one;
  });
  return all;
}

inline at::Tensor on_device(const at::Tensor& like, c10::Device device) {
  if (!like.defined()) return like;
  TORCH_CHECK_NOT_IMPLEMENTED(!c10::isQIntType(like.scalar_type()), "simulated GPU: quantized tensors are not simulated");
  if (has_parts(like)) return by_parts(like, [=](const at::Tensor& part) { return on_device(part, device); });
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device).pinned_memory(c10::nullopt));
}

// Copy values. In evaluation the CPU's batch norm saves no statistics.
inline void copy_values(const at::Tensor& to, const at::Tensor& from) {
  if (from.is_sparse()) {
    to._indices().copy_(from._indices());
    to._values().copy_(from._values());
  } else if (from.is_nested()) {
    to.values().copy_(from.values());
  } else if (from.numel()) {
    to.copy_(from);
  }
}

inline void copy_all(const IValue& to, const IValue& from) {
  auto targets = tensors_of(to), sources = tensors_of(from);
  TORCH_CHECK(targets.size() == sources.size(), "the CPU's kernel has other results");
  for (size_t i = 0; i < targets.size(); ++i) copy_values(targets[i], sources[i]);
}

inline IValue all_on_device(const IValue& like, c10::Device device) {
  return mapped(like, [&](const at::Tensor& one) { return on_device(one, device); });
}
