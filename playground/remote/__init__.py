"""Remote calls: a function runs on another rank, and its result is returned.

`agent.py` is our own agent, on send and recv, small enough for a blackboard, with references to objects that stay with
their owner. `torch_rpc.py` makes the same calls by torch.distributed.rpc. `autograd.py`: graphs that span ranks.
Importing this does not import torch.
"""

from __future__ import annotations

from playground.runtime.remote import remote

AGENTS = {"send-recv": remote("playground.remote.agent:Agent"), "rpc": remote("playground.remote.torch_rpc:TorchAgent")}
"""Agents by name. Each is a context that all ranks enter."""
