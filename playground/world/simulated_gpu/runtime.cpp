// The CUDA runtime of a machine that has no GPU: device memory is host memory, a stream is a queue.
//
// Loaded before torch (LD_PRELOAD), its functions take the place of libcudart's, so that torch's own allocator, streams,
// events and ProcessGroupNCCL run unchanged on top of it. The host goes on when it launches; only what waits on a real
// GPU waits here. Streams come from streams.cpp, kernels from kernels.cpp, NCCL from nccl.cpp.
#include "pinned.h"
#include "races.h"
#include "streams.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

int number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

const int DEVICES = number("PLAYGROUND_SIMULATED_GPU", 1);
const size_t MEMORY = size_t(number("PLAYGROUND_SIMULATED_GPU_MB", 4096)) << 20;

struct Allocation {
  size_t size;
  int device;  // -1: pinned memory of the host
};

// Never destroyed: streams' threads outlive static objects.
struct State {
  std::mutex lock;
  std::map<uintptr_t, Allocation> allocations;
  std::map<int, size_t> used;
};

State& state() {
  static State* one = new State;
  return *one;
}

thread_local cudaError_t last_error = cudaSuccess;

// The kernels are loaded before the first call of one: only a process that uses a GPU has them.
void load_kernels() {
  static std::once_flag first;
  std::call_once(first, [] {
    Dl_info here;
    dladdr(reinterpret_cast<void*>(&load_kernels), &here);
    std::string path(here.dli_fname);
    path.replace(path.rfind('/') + 1, std::string::npos, "kernels.so");
    if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) return;
    fprintf(stderr, "simulated GPU: %s\n", dlerror());
    abort();
  });
}

const Allocation* allocation_of(const void* pointer) {  // the caller holds the lock
  auto found = state().allocations.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (found == state().allocations.begin()) return nullptr;
  --found;
  return reinterpret_cast<uintptr_t>(pointer) < found->first + found->second.size ? &found->second : nullptr;
}

bool pageable(const void* pointer) {
  Lock lock(state().lock);
  return !allocation_of(pointer);
}

// What the host can still hold, in bytes: of its memory, and of what its control group allows, whose cache of files can
// be given up.
size_t left_on_host() {
  size_t left = SIZE_MAX, number = 0, most = 0, used = 0, cached = 0;
  std::string word;
  for (std::ifstream file("/proc/meminfo"); file >> word;)
    if (word == "MemAvailable:" && file >> number) left = number << 10;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> most && std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    for (std::ifstream file("/sys/fs/cgroup/memory.stat"); file >> word >> number;)
      if (word == "active_file" || word == "inactive_file") cached += number;
    left = std::min(left, most - std::min(most, used - std::min(used, cached)));
  }
  return left;
}

const size_t SPARE = size_t(256) << 20;  // left to everything else on the host

// Memory of the host, or MAP_FAILED. It is taken at once, and by one process at a time: what is left for the next
// allocation, of whichever rank, is then known. A kernel may compute its result beside the tensor that it is for.
void* take_from_host(size_t size) {
  static std::mutex in_this_process;
  static const int for_all = [] {
    Dl_info here;
    dladdr(reinterpret_cast<void*>(&take_from_host), &here);
    return open(here.dli_fname, O_RDONLY | O_CLOEXEC);
  }();
  std::lock_guard<std::mutex> guard(in_this_process);
  flock(for_all, LOCK_EX);
  void* memory = MAP_FAILED;
  const size_t left = left_on_host();
  if (left > SPARE && (left - SPARE) / 2 >= size)
    memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  flock(for_all, LOCK_UN);
  if (memory == MAP_FAILED) {
    static std::once_flag once;
    std::call_once(once, [=] {
      fprintf(stderr, "simulated GPU: cuda:%d has room for %zu MiB more, and this host, which is to hold them and what computes them, has %zu MiB left\n",
              current_device, size >> 20, left >> 20);
    });
  }
  return memory;
}

cudaError_t allocate(void** pointer, size_t size, int device) {
  load_kernels();
  size = std::max<size_t>(size, 1);
  Lock lock(state().lock);
  if (device >= 0 && state().used[device] + size > MEMORY) return told(cudaErrorMemoryAllocation);
  if (device >= 0) state().used[device] += size;
  lock.unlock();
  *pointer = take_from_host(size);
  lock.lock();
  if (*pointer == MAP_FAILED) {
    if (device >= 0) state().used[device] -= size;
    return told(cudaErrorMemoryAllocation);
  }
  state().allocations[reinterpret_cast<uintptr_t>(*pointer)] = {size, device};
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (!pointer) return cudaSuccess;
  for (int device = 0; device < DEVICES; ++device) wait_until_idle(device);
  Lock lock(state().lock);
  auto found = state().allocations.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == state().allocations.end()) return told(cudaErrorInvalidValue);
  if (found->second.device >= 0) state().used[found->second.device] -= found->second.size;
  {
    Lock streams_lock(streams().lock);
    forget(found->first, found->first + found->second.size);
  }
  munmap(pointer, found->second.size);
  state().allocations.erase(found);
  return cudaSuccess;
}

// Copies and fills that torch asks of the runtime itself: they know bytes and no tensor.
Operation operation_on_bytes(const char* name, void* to, const void* from, size_t size) {
  const auto access = [&](const void* where, bool writes) {
    auto begin = reinterpret_cast<uintptr_t>(where);
    return Access{begin, begin + size, writes};
  };
  Operation operation{name, {}, [=](size_t) { return std::to_string(size) + " bytes"; }};
  if (from && !pageable(from)) operation.accesses.push_back(access(from, false));
  if (!pageable(to)) operation.accesses.push_back(access(to, true));
  return operation;
}

}  // namespace

cudaError_t told(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

void (*sleep_in_stream)(long cycles) = nullptr;
namespace at::cuda {
void sleep(long cycles) { sleep_in_stream(cycles); }
}  // namespace at::cuda

// A rank that kills itself closes its files before its device lets go of it, which takes a second or more. Its threads
// end first: one that reads from a file keeps it open.
extern "C" int kill(pid_t pid, int signal) {
  using Kill = int (*)(pid_t, int);
  static auto real = reinterpret_cast<Kill>(dlsym(RTLD_NEXT, "kill"));
  if (pid == getpid() && signal == SIGKILL && !streams().all.empty()) {
    for (int file = 3; file < 1024; ++file) fcntl(file, F_SETFD, FD_CLOEXEC);
    char* environment[] = {nullptr};
    execle("/bin/sh", "sh", "-c", "sleep 1.5; kill -9 $$", nullptr, environment);
  }
  return real(pid, signal);
}

extern "C" {

// Devices

cudaError_t cudaGetDeviceCount(int* count) { return *count = DEVICES, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= DEVICES) return told(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaDeviceSynchronize() {
  wait_until_idle(current_device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? 8 : 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= DEVICES) return told(cudaErrorInvalidDevice);
  load_kernels();
  *properties = {};
  strcpy(properties->name, "SIMULATED GPU");
  memset(properties->uuid.bytes, device + 1, sizeof properties->uuid.bytes);
  properties->major = 9;
  properties->totalGlobalMem = MEMORY;
  properties->multiProcessorCount = 8;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->pciBusID = device + 1;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = reinterpret_cast<void*>(+[] { return cudaErrorNotSupported; });
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// Memory

cudaError_t cudaMalloc(void** pointer, size_t size) { return allocate(pointer, size, current_device); }
cudaError_t cudaFree(void* pointer) { return release(pointer); }
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) { return allocate(pointer, size, -1); }
cudaError_t cudaFreeHost(void* pointer) { return release(pointer); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(state().lock);
  return *total = MEMORY, *free = MEMORY - state().used[current_device], cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Lock lock(state().lock);
  const Allocation* allocation = allocation_of(pointer);
  *attributes = {};
  attributes->device = allocation ? allocation->device : -1;
  attributes->type = !allocation ? cudaMemoryTypeUnregistered
      : allocation->device < 0   ? cudaMemoryTypeHost
                                 : cudaMemoryTypeDevice;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  const Operation operation = operation_on_bytes("cudaMemcpyAsync", to, from, size);
  if (pageable(from)) {  // read before the call returns
    auto copy = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + size);
    enqueue(stream, [=] { memcpy(to, copy->data(), size); }, operation);
  } else {
    enqueue(stream, [=] { memcpy(to, from, size); }, operation);
  }
  if (pageable(to)) wait_for(stream_of(stream));
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, size, kind, nullptr);
  wait_for(stream_of(nullptr));
  return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  enqueue(stream, [=] { memset(to, value, size); }, operation_on_bytes("cudaMemsetAsync", to, nullptr, size));
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, nullptr); }
}
