"""A playground of distributed primitives, in the order in which tutorials teach them.

    lessons/        the path: hello, p2p, collectives, allreduce, data-parallel, sgd, ladder, ddp, prove
    algorithms/     our own all-reduce, seven ways
    data_parallel/  DataParallel by its parts: scatter, replicate, parallel_apply, gather
    runtime/        N processes become one world: launch(), init_process(), how ranks meet, what can go wrong
    training/       what lessons that train share: partition, data, net, the rungs of averaging gradients, the loop
    lab/            ways of training side by side: what ladder, prove and the lab of ddp note and time
    measure/        the benchmark of collectives, and the model that predicts them
    show/           results as text, JSON and figures, progress
    testing         the pytest plugin: real ranks for your own tests
    cli/            python -m playground

From a script, a test or a notebook:

    from playground import launch
    launch(fn, 2)    # runs fn(rank, size) on two ranks, returns [result of rank 0, result of rank 1]

Importing this package does not import torch.
"""

from playground.runtime.launch import launch

__all__ = ["launch"]
