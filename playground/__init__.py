"""A playground of distributed primitives, in the order in which tutorials teach them.

    lessons/    the path: hello, p2p, collectives, sgd, ddp. One idea a module; read them in that order
    runtime/    N processes become one world: launch(), init_process(), how ranks meet, what can go wrong
    training/   what sgd and ddp share: partition, data, net, averaging gradients, the loop
    show/       results as text and JSON, progress
    testing     the pytest plugin: real ranks for your own tests
    cli         python -m playground

From a script, a test or a notebook:

    from playground import launch
    launch(fn, 2)    # runs fn(rank, size) on two ranks, returns [result of rank 0, result of rank 1]

Importing this package does not import torch.
"""

from playground.runtime.launch import launch

__all__ = ["launch"]
