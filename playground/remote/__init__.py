"""Remote calls: a function runs on another rank, and its result is returned.

`agent.py` is our own agent, on send and recv, small enough for a blackboard, with references to objects that stay with
their owner. `autograd.py`: graphs that span ranks.
"""
