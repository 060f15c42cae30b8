#pragma once  // nccl.h asks for it, and only kernels would use it
