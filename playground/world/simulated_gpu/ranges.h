// The memory of a tensor, as a piece of work reads or writes it.
#pragma once
#include "arguments.h"
#include "runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <sstream>

using Tensors = std::vector<at::Tensor>;

inline const int64_t MOST_RUNS = 1024;  // of a tensor that is scattered more, no access is known

inline std::string described(const at::Tensor& tensor) {
  std::ostringstream text;
  text << "a " << c10::getDtypeNames(tensor.scalar_type()).first << " tensor of shape " << tensor.sizes();
  return text.str();
}

// Its runs of bytes without a gap: one, unless it is a part of a larger tensor.
inline std::vector<std::pair<uintptr_t, uintptr_t>> runs_of(const at::Tensor& tensor) {
  if (!tensor.numel()) return {};
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) > 1 && tensor.stride(d)) dims.emplace_back(tensor.stride(d), tensor.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t run = 1, count = 1;
  size_t inner = 0;
  for (; inner < dims.size() && dims[inner].first <= run; ++inner) run += (dims[inner].second - 1) * dims[inner].first;
  for (size_t d = inner; d < dims.size(); ++d) count *= dims[d].second;
  if (count > MOST_RUNS) return {};
  const auto start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  std::vector<std::pair<uintptr_t, uintptr_t>> all;
  for (int64_t number = 0; number < count; ++number) {
    int64_t offset = 0, rest = number;
    for (size_t d = inner; d < dims.size(); ++d) {
      offset += rest % dims[d].second * dims[d].first;
      rest /= dims[d].second;
    }
    const uintptr_t begin = start + offset * tensor.itemsize();
    all.emplace_back(begin, begin + run * tensor.itemsize());
  }
  return all;
}

// Add what an operation does with a tensor of the GPU, or of pinned memory, which the host has to leave alone until then.
inline void add_access(Operation& operation, Tensors& tensors, const at::Tensor& tensor, bool writes, bool is_new, bool is_pinned = false) {
  if (!tensor.defined() || !(tensor.is_cuda() || (is_pinned && tensor.is_cpu()))) return;
  if (has_parts(tensor)) {
    const auto add = [&](const at::Tensor& part) { add_access(operation, tensors, part, writes, is_new); };
    if (tensor.is_nested()) return add(tensor.values());
    if (tensor.layout() != c10::kSparse) return;
    add(tensor._indices());
    return add(tensor._values());
  }
  const auto is_freed = [owner = c10::weak_intrusive_ptr<c10::StorageImpl>(tensor.storage().getWeakStorageImpl())] { return owner.expired(); };
  const auto storage = tensor.is_cpu() ? reinterpret_cast<uintptr_t>(tensor.storage().data()) : 0;
  for (auto [begin, end] : runs_of(tensor))
    operation.accesses.push_back({begin, end, writes, tensors.size(), is_new, storage, storage ? storage + tensor.storage().nbytes() : 0, is_freed});
  tensors.push_back(tensor);
}

// Have torch's allocator keep pinned memory until a stream has copied it. False if it is not the allocator's.
inline bool keep_until_copied(const at::Tensor& pinned, c10::cuda::CUDAStream stream) {
  const auto& memory = pinned.storage().data_ptr();
  return at::getHostAllocator(at::kCUDA)->record_event(const_cast<void*>(memory.get()), memory.get_context(), stream.unwrap());
}
