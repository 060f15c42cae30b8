"""What the doctor finds: each fault by the check that is for it, and nothing on a healthy
machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures import Run
from processes import ENOUGH, free_port
from widths import too_wide

from playground.base.errors import UsageError
from playground.tools.doctor import hosts, machine, software
from playground.tools.doctor.checks import ERROR, WARNING, run_checks
from playground.tools.doctor.hosts import HostsFacts, Listener
from playground.tools.doctor.machine import MachineFacts
from playground.tools.doctor.software import TorchFacts

HEALTHY = MachineFacts(
    environ={}, several_hosts=True, hostname="a", resolved={"a": ["10.0.0.1"],
    "localhost": ["::1"]},
    interfaces=["lo", "eth0"], shared_memory=(2**33, ""),
)  # fmt: skip

MACHINES: list[tuple[str, str, dict[str, Any], str]] = [
    ("host-name", ERROR, {"resolved": {"a": ["127.0.1.1"], "localhost": ["::1"]}},
    "a resolves to 127.0.1.1, which no"),
    ("host-name", ERROR, {"resolved": {"a": [], "localhost": ["::1"]}}, "a resolves to nothing"),
    ("loopback", ERROR, {"interfaces": ["eth0"]}, "interface lo is down"),
    ("loopback", ERROR, {"resolved": {"a": ["10.0.0.1"], "localhost": ["10.0.0.9"]}},
    "resolves to 10.0.0.9"),
    ("interface-variables", ERROR, {"environ": {"GLOO_SOCKET_IFNAME": "eth"}}, "that are up are "
                                                                               "lo, eth0"),
    ("shared-memory", WARNING, {"shared_memory": (2**26, "")}, "/dev/shm has 64 MiB"),
    ("shared-memory", ERROR, {"shared_memory": (0, "No space left")}, "16 MiB cannot be put into "
                                                                      "/dev/shm: No space"),
]  # fmt: skip


TORCH = TorchFacts(
    version="2.14.1+cu130",
    import_seconds=2.0,
    cuda="13.0",
    driver=(13, 1),
    visible=2,
    sums={"gloo": ""},
    gpus=2,
)
TORCHES: list[tuple[str, str, dict[str, Any], str]] = [
    ("torch-import", ERROR, {"version": ""}, "torch is not installed"),
    (
        "torch-import",
        ERROR,
        {"stage": "importing torch", "problem": "SIGSEGV"},
        "while importing torch: SIGSEGV",
    ),
    (
        "torch-import",
        WARNING,
        {"stage": "adding up on 2 ranks with gloo", "problem": "no end", "late": 60.0},
        "adding up on 2 ranks with gloo has not finished within 60 s",
    ),
    (
        "gpu-driver",
        ERROR,
        {"visible": 0},
        "lists 2 GPUs, and torch, built for CUDA 13.0, sees none",
    ),
    ("gpu-driver", WARNING, {"cuda": ""}, "2 GPUs, and torch 2.14.1+cu130 is built without CUDA"),
    (
        "all-reduce",
        ERROR,
        {"sums": {"gloo": "3 of 9 elements of a sum are wrong"}},
        "with gloo: 3 of 9",
    ),
]


def test_ranks_add_up() -> None:
    assert software.add_on_ranks("gloo", 2) == ""


@pytest.mark.stress
def test_this_machine_is_examined(run_cli: Run) -> None:
    """Whatever it lacks, and whatever else runs on it: torch can be imported, and two ranks add
    up."""
    shown = run_cli("doctor", "--json")
    document = json.loads(shown.out)
    assert shown.code == any(fault["severity"] == ERROR for fault in document["faults"])
    assert (document["torch"]["problem"], document["torch"]["sums"]["gloo"]) == ("", "")
    assert document["torch"]["import_seconds"] > 0
    assert document["machine"]["resolved"].keys() >= {"localhost"}


def test_a_fault_says_what_was_seen_the_rule_and_the_fix(
    run_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = run_cli("doctor", "--check", "machine")
    assert (shown.code, shown.err) == (
        1,
        "playground: not fit for distributed training: interface-variables\n",
    )
    assert too_wide(shown.out) == []
    text = " ".join(shown.out.split())
    assert "machine: 4 checks, 1 error" in text
    assert "error, interface-variables: GLOO_SOCKET_IFNAME=eth99, and the interfaces" in text
    assert "rule: it names interfaces that are up fix: export GLOO_SOCKET_IFNAME=" in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ("--check", "hosts"),
            "--check hosts: this run has machine, torch; hosts need --hosts, a script its name",
        ),
        (("--hosts", "a,b,a"), "--hosts names a twice: give each host once"),
        (("--hosts", "a"), "--hosts names a alone: give two hosts or more"),
        (("--hosts", "192.0.2.77,192.0.2.78", "--check", "hosts"), "none of them is this machine"),
        (
            ("--hosts", "a,b", "train.py"),
            "doctor train.py starts ranks of its own, here: run it without --hosts",
        ),
    ],
)
def test_what_cannot_be_examined_is_refused(words: tuple[str, ...], why: str, run_cli: Run) -> None:
    shown = run_cli("doctor", *words)
    assert shown.code == 2, shown.err
    assert why in shown.err


def examine_in(shell: str, *place: str) -> tuple[int, list[dict[str, str]]]:
    """What `doctor --check machine` ends with, in a place of its own, where these shell commands
    were run before."""
    command = f'{shell} && exec "{sys.executable}" -m playground doctor --json --check machine'
    done = subprocess.run(
        [*place, "sh", "-c", command], capture_output=True, text=True, timeout=ENOUGH
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["faults"]


NAMESPACES: list[tuple[str, str, str, str]] = [
    ("--mount", "mount -t tmpfs -o size=8m none /dev/shm", "shared-memory", "16 MiB cannot be put "
                                                                            "into /dev/shm"),
    ("--mount", "echo 127.0.1.1 `hostname` > hosts && mount --bind hosts /etc/hosts", "host-name",
    "127.0.1.1"),
    ("--net", "true", "loopback", "the loopback interface lo is down"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "shell", "check", "saw"), NAMESPACES)
def test_a_fault_that_was_made_is_found(
    place: str, shell: str, check: str, saw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "mount"))):
        pytest.skip("only root may make namespaces, with unshare, ip and mount")
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    monkeypatch.chdir(tmp_path)
    code, faults = examine_in(f"{{ {shell}; }}", "unshare", place)
    assert [saw in fault["saw"] for fault in faults if fault["check"] == check] == [True]
    assert code == any(fault["severity"] == ERROR for fault in faults)


@pytest.mark.parametrize(
    ("source", "saw", "fix"),
    [
        (
            f"import os; os.kill(os.getpid(), {signal.SIGSEGV.value})",
            "a process ended while importing torch: SIGSEGV",
            "reinstall",
        ),
        (
            "import time; time.sleep(1000)",
            "importing torch has not finished within 0.1 s",
            "raise --timeout",
        ),
    ],
)
def test_a_torch_that_cannot_be_imported(
    source: str, saw: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = software.examine(0.1 if "sleep" in source else ENOUGH)
    [fault] = run_checks(software.CHECKS, facts)
    assert fault.saw == saw
    assert fix in fault.fix


@pytest.mark.stress
def test_a_torchvision_of_another_torch_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [fault] = run_checks(software.CHECKS, software.examine(ENOUGH))
    assert (fault.check, fault.severity) == ("torch-import", ERROR)
    assert fault.saw.endswith(": RuntimeError: operator torchvision::nms does not exist")


def test_a_torch_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "version_of", lambda package: "")
    assert software.examine(ENOUGH) == TorchFacts()


TRIO = HostsFacts(failures={"b": "", "c": ""}, unheard=[])
CLUSTERS: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "answers",
        ERROR,
        {"failures": {"b": "Connection refused"}},
        "b does not answer: Connection refused",
    ),
    ("answers", ERROR, {"unheard": ["b"]}, "b answers, and does not reach this host"),
]


TIERS: list[tuple[Any, Any, Any]] = [
    (machine, HEALTHY, MACHINES), (software, TORCH, TORCHES), (hosts, TRIO, CLUSTERS)
]  # fmt: skip


@pytest.mark.parametrize(
    ("tier", "healthy", "check", "severity", "fault", "saw"),
    [(tier, healthy, *row) for tier, healthy, rows in TIERS for row in rows],
)
def test_a_fault_is_found_by_one_check(
    tier: Any, healthy: Any, check: str, severity: str, fault: dict[str, Any], saw: str
) -> None:
    [found] = run_checks(tier.CHECKS, replace(healthy, **fault))
    assert (found.check, found.severity) == (check, severity)
    assert saw in found.saw
    assert found.rule
    assert found.fix


def test_every_check_finds_a_fault_and_nothing_where_there_is_none() -> None:
    for tier, healthy, rows in TIERS:
        assert len({check for check, *_ in rows}) == len(tier.CHECKS)
        assert [*run_checks(tier.CHECKS, healthy)] == []


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener("127.0.0.1", "127.0.0.1", 0) as listener:
        yield listener
        listener.shutdown()


@pytest.mark.parametrize("line", [b"", b"{", b"\xff" * 100])
def test_what_is_no_greeting_gets_no_answer(line: bytes, listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), timeout=ENOUGH) as connection:
        connection.sendall(line + b"\n")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""


def test_a_port_that_is_taken_is_refused(listener: Listener) -> None:
    port = listener.port
    with pytest.raises(
        UsageError, match=f"port {port} of 127.0.0.1 is taken: choose another with --port"
    ):
        hosts.listen(["127.0.0.1"], port)


def test_hosts_find_each_other_and_name_the_one_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hosts are addresses of this machine; of three, the second is not there."""
    monkeypatch.setattr(hosts, "LIMIT", ENOUGH)
    names, port = [f"127.0.0.{number}" for number in (1, 9, 2)], int(free_port())
    with socket.socket() as missing:  # so that no other process takes its place
        missing.bind((names[1], port))
        with hosts.listen(names, port) as first, hosts.listen(names, port) as third:
            hosts.greet(third, names[0])
            end = time.monotonic() + ENOUGH
            while not first.heard and time.monotonic() < end:  # it answers, and notes that it has
                time.sleep(0.01)
            found = hosts.meet(first, names, 0)
            first.shutdown()
            third.shutdown()
    assert (first.name, third.name, found.failures[names[2]]) == (names[0], names[2], "")
    assert [fault.saw for fault in run_checks(hosts.CHECKS, found)] == [
        "127.0.0.9 does not answer: Connection refused"
    ]


def test_two_hosts_are_fit(start_cli: Callable[..., subprocess.Popen[str]]) -> None:
    words = (
        "doctor",
        "--hosts",
        "127.0.0.1,127.0.0.2",
        "--port",
        free_port(),
        "--check",
        "hosts",
        "--json",
    )
    started = [start_cli(*words, "--timeout", ENOUGH) for _ in range(2)]
    ended = [json.loads(each.communicate(timeout=2 * ENOUGH)[0]) for each in started]
    assert [each.returncode for each in started] == [0, 0]
    assert [[*document["hosts"]["failures"].values()] for document in ended] == [[""], [""]]
