"""GPUs that are not there: PyTorch runs unchanged, its ProcessGroupNCCL included, and three
libraries that are compiled here take the place of the CUDA runtime with the driver, of NCCL, and of
the kernels, which compute on the CPU. Does not import torch.

What is wrong on the nccl path shows as it would on a GPU: tensors on two devices, a missing wait,
messages that do not match. How fast anything is, it cannot tell.
"""
