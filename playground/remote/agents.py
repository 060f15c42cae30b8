"""Which agents there are, by name. Importing this does not import torch."""

from __future__ import annotations

from playground.runtime.remote import remote

AGENTS = {
    "send-recv": remote("playground.remote.agent:Agent"),
    "rpc": remote("playground.remote.torch_rpc:TorchAgent"),
}
"""What carries remote calls: our own agent, or torch.distributed.rpc. Each is a context that all ranks enter."""
