"""Remote calls: a function runs on another rank, its result comes back; what must not move is referred to from afar.

`agent.py` is our own, on send and recv, small enough for a blackboard. `torch_rpc.py` has torch.distributed.rpc answer
the same calls. `references.py`: objects that stay with their owner; `autograd.py`: graphs that span ranks.
"""
