// What is not simulated, and is refused by name. Above all kernels that nothing has taken the place of, PyTorch's or an
// extension's: their code is for a GPU, so that their launch is an error that names the kernel.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr size_t LONGEST = 160;  // characters of a name: templates make it long

// What the host calls, and the kernel's name. Never destroyed: libraries register kernels before main, and in any order.
std::vector<std::pair<const void*, const char*>>& kernels() {
  static auto* all = new std::vector<std::pair<const void*, const char*>>;
  return *all;
}

std::string name_of(const void* function) {
  auto found = std::find_if(kernels().begin(), kernels().end(), [=](const auto& one) { return one.first == function; });
  if (found == kernels().end()) return "a kernel";
  int status = 0;
  std::unique_ptr<char, decltype(&free)> readable(abi::__cxa_demangle(found->second, nullptr, nullptr, &status), &free);
  std::string name = readable ? readable.get() : found->second;
  return name.size() > LONGEST ? name.substr(0, LONGEST) + "..." : name;
}

[[noreturn]] void refuse_kernel(const void* function) {
  throw std::runtime_error("simulated GPU: this kernel in CUDA needs a GPU, and nothing simulates it: " + name_of(function));
}

cudaError_t refuse(const char* what) {
  fprintf(stderr, "simulated GPU: %s\n", what);
  return cudaErrorNotSupported;
}

}  // namespace

extern "C" {

// What nvcc writes into a library: all its kernels are registered when it is loaded.
void** __cudaRegisterFatBinary(void*) {
  static void* none = nullptr;
  return &none;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels().emplace_back(function, name);
}

// And for each launch.
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) { refuse_kernel(kernel); }
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) { refuse_kernel(function); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) { refuse_kernel(function); }

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return refuse("CUDA graphs are not simulated: run the script without torch.cuda.graph and torch.cuda.make_graphed_callables");
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  return refuse("a tensor on a GPU cannot be shared with another process: share it on the CPU, or send it with torch.distributed");
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t*, int) {
  return refuse("cudaMallocAsync is not simulated: leave the allocator's backend at native in PYTORCH_ALLOC_CONF");
}
}
