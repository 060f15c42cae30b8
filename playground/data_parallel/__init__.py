"""DataParallel by its parts: one process, many devices, a thread for each.

    scatter         cut the batch into chunks, one for each device
    replicate       copy the module to each device
    parallel_apply  run each copy on its chunk, in a thread of its own
    gather          bring the outputs together on one device
    data_parallel   the four in a row; DataParallel is the same as a module

Gradients find the same way back: to the one original module, whose optimizer alone takes the step.

Devices are GPUs ("cuda:0", "cuda:1", …) or virtual ones on the CPU ("cpu:0", "cpu:1", …), which torch accepts and takes
all for the same. Here they differ: what moves between them is really copied, and `watched` keeps an account of each.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

from playground.data_parallel.criterion import DataParallelCriterion, DataParallelModel, LossModel, weighted_mean
from playground.data_parallel.gather import gather
from playground.data_parallel.memory import watched
from playground.data_parallel.module import DataParallel, data_parallel
from playground.data_parallel.parallel_apply import parallel_apply
from playground.data_parallel.replicate import replicate
from playground.data_parallel.scatter import chunk_sizes, scatter

__all__ = [
    "DataParallel",
    "DataParallelCriterion",
    "DataParallelModel",
    "LossModel",
    "chunk_sizes",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "watched",
    "weighted_mean",
]
