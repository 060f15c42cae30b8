// The driver's libraries, libcuda, NVML and CUPTI: what is asked of them without the runtime.
#include <cstdlib>
#include <cstring>

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }

// What Triton asks for before it loads a kernel, which is code for a GPU: the first of them ends that.
constexpr int NOT_SUPPORTED = 801, NOT_PERMITTED = 800;
int cuGetErrorString(int error, const char** text) {
  *text = error == NOT_SUPPORTED   ? "the kernels of Triton need a GPU, and this one is simulated: for torch.compile, take backend=\"aot_eager\""
          : error == NOT_PERMITTED ? "expandable segments are not simulated: leave them out of PYTORCH_ALLOC_CONF"
                                   : "an error of the simulated GPU";
  return 0;
}
int cuMemAddressReserve() { return NOT_PERMITTED; }  // with which an expandable segment begins
#define LACK(name) \
  int name() { return NOT_SUPPORTED; }
LACK(cuCtxGetCurrent) LACK(cuCtxGetDevice) LACK(cuCtxGetLimit) LACK(cuCtxSetCurrent) LACK(cuCtxSetLimit) LACK(cuDeviceGet)
LACK(cuDeviceGetAttribute) LACK(cuDevicePrimaryCtxRetain) LACK(cuFuncGetAttribute) LACK(cuFuncSetAttribute)
LACK(cuFuncSetCacheConfig) LACK(cuLaunchKernelEx) LACK(cuModuleGetFunction) LACK(cuModuleLoadData) LACK(cuModuleUnload)
LACK(cuPointerGetAttribute) LACK(cuStreamIsCapturing) LACK(cuTensorMapEncodeTiled) LACK(cuOccupancyMaxActiveClusters)

// Without a real driver, CUPTI calls itself until the stack is full: what torch's profiler asks of it is refused here.
#define REFUSE(name) \
  int name() { return 27; }  // not supported
REFUSE(cuptiActivityDisable) REFUSE(cuptiActivityEnable) REFUSE(cuptiActivityEnableCudaEventDeviceTimestamps)
REFUSE(cuptiActivityEnableDriverApi) REFUSE(cuptiActivityEnableRuntimeApi) REFUSE(cuptiActivityFlushAll)
REFUSE(cuptiActivityGetNextRecord) REFUSE(cuptiActivityGetNumDroppedRecords) REFUSE(cuptiActivityPopExternalCorrelationId)
REFUSE(cuptiActivityPushExternalCorrelationId) REFUSE(cuptiActivityRegisterCallbacks)
REFUSE(cuptiActivityRegisterTimestampCallback) REFUSE(cuptiActivitySetAttribute) REFUSE(cuptiEnableCallback)
REFUSE(cuptiEnableDomain) REFUSE(cuptiFinalize) REFUSE(cuptiGetCallbackName) REFUSE(cuptiGetVersion)
REFUSE(cuptiSubscribe) REFUSE(cuptiUnsubscribe)
int cuptiGetResultString(int, const char** text) { return *text = "no CUPTI on a simulated GPU", 0; }

int nvmlInit() { return 0; }
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetCount_v2(int* count) { return *count = atoi(getenv("PLAYGROUND_SIMULATED_GPU")), 0; }
int nvmlShutdown() { return 0; }
// What torch looks up before it says that memory is exhausted, and by whom
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void**) { return 0; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return 3; }  // not supported
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 3; }
int nvmlSystemGetDriverVersion(char* text, unsigned length) { return strncpy(text, "580.0", length), 0; }
}
