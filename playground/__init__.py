"""A playground of distributed primitives, in the order in which tutorials teach them.

    lessons/      the path, a folder for each chapter: hello, p2p, collectives, all_reduce, data_parallel, sgd, ladder,
                  ddp, prove
    tools/        bench measures collectives, scale predicts them
    algorithms/   our own all-reduce, an algorithm a file, and what carries its messages
    training/     what lessons that train share: partition, data, net, the training step, gradient synchronisation
    measurement/  timing side by side, and the machine it was done on
    runtime/      N processes become one world: launch(), init_process(), rendezvous, backends, failures
    console/      what every command shares: options, tables, progress, plots, JSON
    app           the command line put together
    testing       the pytest plugin: real ranks for your own tests

From a script, a test or a notebook:

    from playground import launch
    launch(fn, 2)    # runs fn(rank, size) on two ranks, returns [result of rank 0, result of rank 1]

Importing this package does not import torch.
"""

from playground.runtime.launch import launch

__all__ = ["launch"]
