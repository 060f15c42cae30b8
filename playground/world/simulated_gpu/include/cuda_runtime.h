// What nccl.h includes it for: the runtime's types.
#pragma once
#include <cuda_runtime_api.h>
