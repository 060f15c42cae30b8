"""The doctor on several hosts, with faults that were made: it names the host or the link, and no other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hosts import Host, Network, ip
from processes import ENOUGH

pytestmark = pytest.mark.stress

Hosts = Callable[..., Network]
FAST, SLOW = "100mbit", "20mbit"
PORT = 29600


def examine(
    network: Network, *words: object, absent: tuple[Host, ...] = (), **environ: str
) -> tuple[list[int], dict[str, Any]]:
    """The exit codes of the hosts that are there, and the document of the one that leads. The variables are set on the
    second host only."""
    listed = ",".join(host.address for host in network.hosts)
    command = (sys.executable, "-m", "playground", "doctor", "--hosts", listed, "--json", "--timeout", 5)
    started = [
        host.start(*command, *(words or ("--check", "hosts")), **(environ if host.number == 1 else {}))
        for host in network.hosts
        if host not in absent
    ]
    ended = [each.communicate(timeout=ENOUGH) for each in started]
    documents = [json.loads(out) for out, _ in ended if out]
    [found] = [document for document in documents if "hosts" in document]
    return [each.returncode for each in started], found


def told(document: dict[str, Any]) -> list[str]:
    return [f"{finding['check']}: {finding['saw']}" for finding in document["findings"]]


def lay_slow_cable(one: Host, other: Host) -> None:
    """From now on, what two hosts send each other takes a cable of its own."""
    ip("-n", one.namespace, "link", "add", "own", "type", "veth", "peer", "name", "own", "netns", other.namespace)
    for host in (one, other):
        ip("-n", host.namespace, "link", "set", "own", "up")
        host.limit(SLOW, "own")
    for here, there in ((one, other), (other, one)):
        ip("-n", here.namespace, "route", "add", f"{there.address}/32", "dev", "own", "src", here.address)


def test_healthy_hosts_are_fit(hosts: Hosts) -> None:
    codes, document = examine(hosts(4))
    assert (codes, told(document)) == ([0] * 4, [])
    assert len(document["hosts"]["links"]) == 12


def test_torchrun_s_hosts_are_fit(hosts: Hosts) -> None:
    """One process of each host examines it, and rank 0 reports."""
    network = hosts(3)
    started = [host.torchrun(2, "doctor", "--check", "hosts", "--json") for host in network.hosts]
    outs = [each.communicate(timeout=ENOUGH)[0] for each in started]
    assert [each.returncode for each in started] == [0] * 3
    assert outs[1:] == ["", ""]
    found = json.loads(outs[0])["hosts"]
    assert (found["names"], len(found["links"])) == (["host-a", "host-b", "host-c"], 6)


def test_a_slow_host_is_named(hosts: Hosts) -> None:
    network = hosts(4, rate=FAST)
    network.hosts[2].limit(SLOW)
    codes, document = examine(network)
    assert codes == [0] * 4
    [finding] = told(document)
    assert finding.startswith("bandwidth: 10.77.0.3 has a bandwidth ")


def test_a_slow_link_is_named(hosts: Hosts) -> None:
    network = hosts(4, rate=FAST)
    lay_slow_cable(network.hosts[1], network.hosts[3])
    _, document = examine(network)
    [finding] = told(document)
    assert finding.startswith("bandwidth: the link between 10.77.0.2 and 10.77.0.4 has a bandwidth ")


def test_a_missing_host_is_named_and_the_others_go_on(hosts: Hosts) -> None:
    network = hosts(3)
    codes, document = examine(network, absent=(network.hosts[0],))
    assert (codes, told(document)) == (
        [1, 1], [f"answers: {network.hosts[0].address} does not answer: Connection refused"]
    )  # fmt: skip
    assert len(document["hosts"]["links"]) == 2


def test_a_host_that_takes_no_connection(hosts: Hosts) -> None:
    """It can connect to others: so do firewalls of a single host."""
    network = hosts(3)
    rule = ("pref", 10, "ipproto", "tcp", "sport", PORT, "blackhole")
    ip("-n", network.hosts[1].namespace, "rule", "add", *rule)
    codes, document = examine(network)
    assert codes == [1] * 3
    assert told(document) == ["answers: 10.77.0.2 does not answer: it greets, but takes no connection: timed out"]


def test_two_hosts_without_a_route(hosts: Hosts) -> None:
    network = hosts(3)
    ip("-n", network.hosts[1].namespace, "route", "add", "blackhole", f"{network.hosts[2].address}/32")
    _, document = examine(network)
    [finding] = told(document)
    assert finding.startswith("connections: no connection between 10.77.0.2 and 10.77.0.3: ")


def test_a_port_of_the_switch_that_drops_large_packets(hosts: Hosts) -> None:
    network = hosts(3)
    ip("-n", network.switch, "link", "set", network.hosts[1].port, "mtu", 1300)
    for host in network.hosts:  # packets as they are on a wire
        ip("-n", host.namespace, "link", "set", "dev", "eth0", "gso_max_segs", 1)
    _, document = examine(network)
    assert sorted(told(document)) == [
        f"large-packets: between {pair} small packets arrive and large ones do not"
        for pair in ("10.77.0.1 and 10.77.0.2", "10.77.0.2 and 10.77.0.3")
    ]


def test_what_another_host_has_found_is_told(hosts: Hosts) -> None:
    codes, document = examine(hosts(2), "--check", "interface-variables,hosts", GLOO_SOCKET_IFNAME="eth7")
    assert codes == [1, 1]
    [finding] = document["findings"]
    assert (finding["host"], finding["check"]) == ("10.77.0.2", "interface-variables")
