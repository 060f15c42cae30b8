"""gloo: TCP between CPUs, on any machine. Source: https://github.com/pytorch/gloo"""

from __future__ import annotations

import os
import re

from playground.world.backends.backend import Backend

MISSING_RANK = re.compile(r"[Ww]ait timeout after (\d+)ms, keys: .*/(\d+)")


class Gloo(Backend):
    name = "gloo"
    device_type = "cpu"
    summary = "CPU"
    interface_variable = "GLOO_SOCKET_IFNAME"
    trusts_host_name = True

    def connects_later(self) -> bool:
        return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in ("1", "t", "true", "y", "yes")

    def explain_init_failure(self, error: Exception) -> str:
        """As in `Backend`. A rank that came to the meeting and no further is named: it is the last
        number of the key that gloo waited for."""
        if missing := MISSING_RANK.search(str(error)):
            return (
                f"rank {missing[2]} came to the meeting, but did not connect within "
                f"{float(missing[1]) / 1000:g} s"
            )
        return super().explain_init_failure(error)
