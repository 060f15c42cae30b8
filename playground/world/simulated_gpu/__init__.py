"""GPUs that are not there: PyTorch runs unchanged, its ProcessGroupNCCL included, and three
libraries that are compiled here take the place of the CUDA runtime with the driver, of NCCL, and of
the kernels, which compute on the CPU. Does not import torch.

What is wrong on the nccl path shows as it would on a GPU: tensors on two devices, a missing wait,
messages that do not match. How fast anything is, it cannot tell.

Begin with `runtime.cpp` and `streams.cpp`. `build.LIBRARIES` says which file is in which library.

__main__, environment  a command with simulated GPUs
build                  compiles the libraries

In C++, in place of CUDA:

runtime     the CUDA runtime: devices and their memory
streams     streams and events
driver      the driver's libraries
refusals    what is refused by name
nccl        NCCL, between processes of this machine

Mistakes that are told:

races       work on the same memory that no wait orders
pinned      memory of the host that is touched too early
lines       the program's line that a thread is at

In place of PyTorch's kernels:

kernels     operators, by the CPU's kernels
composed    operators that the CPU lacks
attention   attention in one kernel
memory      what is alive when a GPU holds most
"""
