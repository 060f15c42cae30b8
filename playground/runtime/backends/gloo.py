"""gloo: TCP between CPUs, on any machine.

Source: https://github.com/pytorch/gloo
"""

from __future__ import annotations

from playground.runtime.backends.backend import Backend


class Gloo(Backend):
    name = "gloo"
    device_type = "cpu"
    summary = "CPU"
    interface_variable = "GLOO_SOCKET_IFNAME"
    trusts_host_name = True
