"""The benchmark on two hosts whose link is slow."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hosts import Network

RATE = 0.0125
"""GB/s: 100 Mbit/s."""
SLACK = 1.1
"""By how much what is measured may exceed the rate: by what a cable lets through at once."""


@pytest.mark.stress
def test_the_limit_is_that_of_the_link_between_hosts(hosts: Callable[..., Network]) -> None:
    words = ("--algorithm", "ring,hierarchical", "-b", "4M", "-e", "4M", "--iterations", 3, "--limit", "--json")
    first, second = (host.torchrun(2, "bench", *words) for host in hosts(2, rate="100mbit").hosts)
    out, err = first.communicate(timeout=120)
    second.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0), err
    document = json.loads(out)
    assert document["limit"]["what"] == "TCP from host to host between ranks 0 and 2, both ways at once"
    [limit] = document["limit"]["rows"]
    assert limit["busbw"] < RATE * SLACK
    assert [(row["algorithm"], row["wrong"]) for row in document["rows"]] == [("ring", 0), ("hierarchical", 0)]
    assert document["rows"][0]["busbw"] < RATE * SLACK
