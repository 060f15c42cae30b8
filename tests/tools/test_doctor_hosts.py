"""The doctor on several hosts, with faults that were made: it names the host, and no other."""

from __future__ import annotations

import json
import sys

import pytest
from fixtures import Networks
from hosts import Host, Network, ip
from processes import ENOUGH

pytestmark = pytest.mark.stress


def examine(network: Network, absent: tuple[Host, ...] = ()) -> list[list[str]]:
    """The faults of each host that is there, whose exit code is that of them."""
    listed = ",".join(host.address for host in network.hosts)
    words = ("doctor", "--hosts", listed, "--json", "--timeout", 5, "--check", "hosts")
    started = [
        host.start(sys.executable, "-m", "playground",
        *words) for host in network.hosts if host not in absent
    ]  # fmt: skip
    found = [json.loads(each.communicate(timeout=ENOUGH)[0])["faults"] for each in started]
    assert [each.returncode for each in started] == [int(bool(faults)) for faults in found]
    return [[f"{each['check']}: {each['saw']}" for each in faults] for faults in found]


def test_healthy_hosts_are_fit(hosts: Networks) -> None:
    assert examine(hosts(4)) == [[]] * 4


def test_a_missing_host_is_named_by_the_others(hosts: Networks) -> None:
    network = hosts(3)
    missing = network.hosts[0]
    assert (
        examine(network, absent=(missing,))
        == [[f"answers: {missing.address} does not answer: Connection refused"]] * 2
    )


def test_two_hosts_without_a_route(hosts: Networks) -> None:
    network = hosts(3)
    ip(
        "-n",
        network.hosts[1].namespace,
        "route",
        "add",
        "blackhole",
        f"{network.hosts[2].address}/32",
    )
    first, [second], [third] = examine(network)
    assert first == []
    assert second.startswith("answers: 10.77.0.3 does not answer: ")
    assert third.startswith("answers: 10.77.0.2 does not answer: ")
