"""What the doctor finds: each fault by the check that is for it, and nothing on a healthy machine."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from processes import ENOUGH, free_port
from widths import too_wide

from playground.runtime.errors import UsageError
from playground.tools.doctor import ERROR, WARNING, hosts, machine, run_checks, software
from playground.tools.doctor.hosts import Handler, HostsFacts, Listener
from playground.tools.doctor.machine import MachineFacts
from playground.tools.doctor.software import TorchFacts

Run = Callable[..., Any]
HEALTHY = MachineFacts(
    environ={}, several_hosts=True, hostname="a", resolved={"a": ["10.0.0.1"], "localhost": ["::1"]},
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"}, unreachable={}, port_refusal="",
    shared_memory=(2**33, ""), limits={"NOFILE": 1024, "NPROC": -1}, available_memory=2**33,
    cores=4, quota=math.inf, temporary=("/tmp", 2**34), shadows=[],
)  # fmt: skip
ONE_HOST = {"several_hosts": False}

MACHINES: list[tuple[str, str, dict[str, Any], str]] = [
    ("import-path", ERROR, {"shadows": [("torch", "/home/me/torch.py")]}, "/home/me/torch.py would be imported"),
    ("host-name", ERROR, {"resolved": {"a": ["127.0.1.1"]}}, "a resolves to 127.0.1.1, which no other host can reach"),
    ("host-name", ERROR, {"resolved": {"a": []}}, "a resolves to nothing"),
    ("host-name", WARNING, {"resolved": {"a": None}}, "does not resolve within"),
    ("loopback", ERROR, {"interfaces": {"eth0": "10.0.0.1"}}, "interface lo is down"),
    ("loopback", ERROR, {"resolved": {"localhost": ["10.0.0.9"]}}, "localhost resolves to 10.0.0.9"),
    ("interface-variables", ERROR, {"environ": {"GLOO_SOCKET_IFNAME": "eth"}}, "has an address is lo, eth0"),
    ("interface-variables", WARNING, {"environ": {"NCCL_SOCKET_IFNAME": "ib"}}, "NCCL_SOCKET_IFNAME=ib, and"),
    ("interface-variables", WARNING, {"environ": {"NCCL_SOCKET_IFNAME": "^eth,lo"}}, "NCCL_SOCKET_IFNAME=^eth,lo"),
    ("interface-variables", ERROR, {"environ": {"GLOO_SOCKET_IFNAME": "lo"}}, "in a world of several hosts"),
    ("firewall", ERROR, {"unreachable": {"eth0": "timed out"}}, "own address on eth0 fails: timed out"),
    ("firewall", WARNING, {"unreachable": {"lo": "timed out"}} | ONE_HOST, "own address on lo fails"),
    ("master-address", ERROR, {"environ": {"MASTER_ADDR": "nowhere"}, "resolved": {"nowhere": []}}, "nowhere resolves"),
    ("master-port", ERROR, {"environ": {"MASTER_PORT": "29501"}, "port_refusal": "in use"}, "port 29501: in use"),
    ("master-port", WARNING, {"port_refusal": "in use"}, "port 29500, torchrun's default: in use"),
    ("shared-memory", WARNING, {"shared_memory": (2**26, "")}, "/dev/shm has 64 MiB"),
    ("shared-memory", ERROR, {"shared_memory": (0, "No space left")}, "16 MiB cannot be put into /dev/shm: No space"),
    ("limits", WARNING, {"limits": {"NOFILE": 64}}, "ulimit -n is 64"),
    ("memory", WARNING, {"available_memory": 2**27}, "128 MiB of memory are available"),
    ("cores", WARNING, {"quota": 1.5}, "4 cores are seen, and the container may use the time of 1.5"),
    ("threads", WARNING, {"environ": {"OMP_NUM_THREADS": "64"}}, "OMP_NUM_THREADS=64 on 4 cores"),
    ("disk", WARNING, {"temporary": ("/tmp", 0)}, "0 B are free in /tmp"),
    ("disk", ERROR, {"temporary": ("", 0)}, "no folder for temporary files"),
]  # fmt: skip


H100 = ("H100", 500, 80_000, 0)
TORCH = TorchFacts(
    version="2.14.1+cu130", import_seconds=2.0, cuda="13.0", driver=(13, 1), visible=2, sums={"gloo": ""},
    gpus=(H100, H100),
)  # fmt: skip
TORCHES: list[tuple[str, str, dict[str, Any], str]] = [
    ("torch-import", ERROR, {"version": ""}, "torch is not installed"),
    ("torch-import", ERROR, {"stage": "importing torch", "problem": "SIGSEGV"}, "while importing torch: SIGSEGV"),
    ("torch-import", WARNING, {"import_seconds": 50.0}, "took 50 s"),
    ("gpu-driver", ERROR, {"visible": 0}, "lists 2 GPUs, and torch, built for CUDA 13.0, sees none"),
    ("gpu-driver", WARNING, {"cuda": ""}, "2 GPUs, and torch 2.14.1+cu130 is built without CUDA"),
    ("all-reduce", ERROR, {"sums": {"gloo": "3 of 9 elements of a sum are wrong"}}, "with gloo: 3 of 9"),
    ("gpus", WARNING, {"gpus": (H100, ("A100", 500, 80_000, 0))}, "GPUs of 2 kinds: A100, H100"),
    ("gpus", WARNING, {"gpus": (H100, ("H100", 500, 80_000, 99))}, "GPU 1 is busy: 99 % of its time"),
]


def test_this_machine_is_examined(run_cli: Run) -> None:
    """Whatever it lacks, and whatever else runs on it: torch can be imported, and two ranks add up."""
    shown = run_cli("doctor", "--json")
    document = json.loads(shown.out)
    assert shown.code == any(finding["severity"] == ERROR for finding in document["findings"])
    assert (document["torch"]["problem"], document["torch"]["sums"]["gloo"]) == ("", "")
    assert document["torch"]["import_seconds"] > 0
    assert document["machine"]["resolved"].keys() >= {"localhost"}


def test_a_finding_says_what_was_seen_the_rule_and_the_fix(run_cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    for name in ("COLUMNS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    shown = run_cli("doctor", "--check", "interface-variables,threads")
    assert (shown.code, shown.err) == (1, "playground: not fit for distributed training: interface-variables\n")
    assert too_wide(shown.out) == []
    text = " ".join(shown.out.split())
    assert "machine: 2 checks, 1 error error, interface-variables: GLOO_SOCKET_IFNAME=eth99, and what is up" in text
    assert "rule: it names interfaces that are up and have an address fix: export GLOO_SOCKET_IFNAME=" in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--check", "bandwidth"), "--check bandwidth is about several hosts: add --hosts"),
        (("--check", "blood-pressure"), "'blood-pressure' is none of machine, torch, hosts, script, import-path"),
        (("--hosts", "a,b,a"), "--hosts names a twice: give each host once"),
        (("--hosts", "a"), "--hosts names a alone: give two hosts or more"),
        (("--hosts", "192.0.2.77,192.0.2.78", "--check", "hosts"), "none of them is this machine"),
        (("--check", "tags"), "--check tags is about a script: name one"),
        (("--check", "torch", "train.py"), "--check torch is about this machine: leave out the script"),
        (("--hosts", "a,b", "train.py"), "doctor train.py starts ranks of its own, here: run it without torchrun"),
    ],
)
def test_what_cannot_be_examined_is_refused(words: tuple[str, ...], why: str, run_cli: Run) -> None:
    shown = run_cli("doctor", *words)
    assert shown.code == 2
    assert why in shown.err


def test_the_environment_s_faults_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "PYTHONPATH": str(tmp_path),
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        found = [f"{each.check}: {each.saw}" for each in run_checks(machine.CHECKS, machine.CHECKS, MachineFacts())]
    for begin in (f"master-port: nothing can listen at port {port}: ", f"import-path: {tmp_path}/torch.py would be "):
        assert sum(each.startswith(begin) for each in found) == 1, found


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(name: str, *args: object, **kwargs: object) -> list[Any]:
        if name == "slow.example":
            threading.Event().wait(ENOUGH)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(machine, "NETWORK_LIMIT", 0.5)
    monkeypatch.setenv("MASTER_ADDR", "slow.example")
    assert machine.resolve_names() == {socket.gethostname(): [], "localhost": [], "slow.example": None}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5), ({"cpu.max": "max 100000"}, math.inf), ({}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    ],
)  # fmt: skip
def test_the_quota_of_a_container(files: dict[str, str], quota: float, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert machine.read_quota(tmp_path) == quota


def examine_in(shell: str, check: str, *place: str) -> tuple[int, list[dict[str, str]]]:
    """What `doctor --check` ends with where these shell commands have been run before, in a place of its own."""
    command = f'{shell} && exec "{sys.executable}" -m playground doctor --json --check {check}'
    done = subprocess.run([*place, "sh", "-c", command], capture_output=True, text=True, timeout=ENOUGH)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


BRIDGE = "ip link set lo up && ip link add b0 type bridge && ip addr add 10.9.8.7/24 dev b0 && ip link set b0 up"
NAMESPACES: list[tuple[str, str, str, str]] = [
    ("--mount", "mount -t tmpfs -o size=8m none /dev/shm", "shared-memory", "16 MiB cannot be put into /dev/shm"),
    ("--mount", "echo 127.0.1.1 `hostname` > hosts && mount --bind hosts /etc/hosts", "host-name", "127.0.1.1"),
    ("--net", "true", "loopback", "the loopback interface lo is down"),
    (
        "--net", f"{BRIDGE} && ip rule add pref 9 lookup local && ip rule del pref 0 && "
        "ip rule add pref 8 to 10.9.8.7 blackhole", "firewall", "own address on b0 fails",
    ),
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
    code, findings = examine_in(f"{{ {shell}; }}", check, "unshare", place)
    assert [saw in finding["saw"] for finding in findings] == [True]
    assert code == (findings[0]["severity"] == ERROR)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (f"import os; os.kill(os.getpid(), {signal.SIGSEGV.value})", "SIGSEGV"),
        ("import time; time.sleep(1000)", "no end within 0.1 s"),
    ],
)
def test_a_torch_that_cannot_be_imported(
    source: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = software.examine(0.1 if "sleep" in source else ENOUGH)
    [finding] = run_checks(software.CHECKS, ["torch-import"], facts)
    assert finding.saw == f"a process ended while importing torch: {problem}"


@pytest.mark.stress
def test_a_torchvision_of_another_torch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [finding] = run_checks(software.CHECKS, software.CHECKS, software.examine(ENOUGH))
    assert (finding.check, finding.severity) == ("torch-import", ERROR)
    assert finding.saw.endswith(": RuntimeError: operator torchvision::nms does not exist")


def test_a_torch_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "version_of", lambda package: "")
    assert software.examine(ENOUGH) == TorchFacts()


SLOWER = 4.0


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[hosts.Pair, float], set[int], set[hosts.Pair]]:
    """The slowness of all links of 3 to 10 hosts that differ by up to 40 %, one of them or one link being slow."""
    size = draw(st.integers(3, 10))
    slowness = {pair: draw(st.floats(1e-9, 1.4e-9)) for pair in combinations(range(size), 2)}
    slow_hosts = draw(st.sets(st.integers(0, size - 1), max_size=1))
    slow_links = set() if slow_hosts else draw(st.sets(st.sampled_from([*slowness]), max_size=1))
    for pair in slowness:
        slowness[pair] *= SLOWER if pair in slow_links or slow_hosts & {*pair} else 1
    return slowness, slow_hosts, slow_links


@given(clusters())
def test_what_is_slow_is_named_and_nothing_else(
    cluster: tuple[dict[hosts.Pair, float], set[int], set[hosts.Pair]],
) -> None:
    slowness, slow_hosts, slow_links = cluster
    by_host, by_link = hosts.explain(slowness)
    assert {host for host, factor in by_host.items() if factor > hosts.LIMITS["bandwidth"]} == slow_hosts
    assert {pair for pair, factor in by_link.items() if factor > hosts.LIMITS["bandwidth"]} == slow_links


@pytest.mark.parametrize("size", range(8))
def test_each_pair_meets_once_and_no_host_twice_in_a_round(size: int) -> None:
    played = [*hosts.schedule_rounds(range(size))]
    assert sorted(pair for pairs in played for pair in pairs) == [*combinations(range(size), 2)]
    for pairs in played:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs)


ABOUT = {"name": "a", "versions": {"python": "3.12.1", "torch": "2.14.1", "playground": "0.1.0"}, "findings": []}
OLD = ABOUT | {"versions": {"python": "3.12.1", "torch": "2.13.0", "playground": "0.1.0"}}
LINK = {"latency": 5e-5, "bandwidth": 1e9, "problem": ""}
TRIO = HostsFacts(
    names=("a", "b", "c"), about=dict.fromkeys(range(3), ABOUT),
    links={(one, two): LINK for one in range(3) for two in range(3) if one != two},
)  # fmt: skip


def with_links(**changed: object) -> HostsFacts:
    """The trio, with other links: `ab` is from a to b, `bandwidth` what differs."""
    what = {name: value for name, value in changed.items() if len(name) > 2}
    links = {("abc".index(ends[0]), "abc".index(ends[1])): LINK | what for ends in changed if len(ends) == 2}
    return replace(TRIO, links={**TRIO.links, **links})


CLUSTERS: list[tuple[str, str, HostsFacts, str]] = [
    ("answers", ERROR, replace(TRIO, silent={1: "Connection refused"}), "b does not answer: Connection refused"),
    ("host-versions", WARNING, replace(TRIO, about={**TRIO.about, 2: OLD}), "torch 2.14.1, but 2.13.0 on c"),
    ("connections", ERROR, with_links(bc=1, problem="timed out"), "no connection from b to c: timed out"),
    ("large-packets", ERROR, with_links(ab=1, ba=1, problem=hosts.STUCK), "between a and b small packets arrive"),
    ("large-packets", ERROR, with_links(ab=1, problem=hosts.STUCK), "from b to a small packets arrive"),
    ("bandwidth", WARNING, with_links(cb=1, bandwidth=2e8), "the link between b and c has a bandwidth 5.0"),
    ("bandwidth", WARNING, with_links(ab=1, ac=1, bandwidth=2e8), "a has a bandwidth 5.0 times lower"),
    ("latency", WARNING, with_links(ac=1, latency=5e-3), "the link between a and c has a latency 100.0"),
]


TIERS: list[tuple[Any, Any, Any]] = [(machine, HEALTHY, MACHINES), (software, TORCH, TORCHES)]
TIERS += [(hosts, TRIO, [(check, severity, vars(found), saw) for check, severity, found, saw in CLUSTERS])]


@pytest.mark.parametrize(
    ("tier", "healthy", "check", "severity", "fault", "saw"),
    [(tier, healthy, *row) for tier, healthy, rows in TIERS for row in rows],
)
def test_a_fault_is_found_by_one_check(
    tier: Any, healthy: Any, check: str, severity: str, fault: dict[str, Any], saw: str
) -> None:
    [finding] = run_checks(tier.CHECKS, tier.CHECKS, replace(healthy, **fault))
    assert (finding.check, finding.severity) == (check, severity)
    assert saw in finding.saw
    assert finding.rule
    assert finding.fix


def test_every_check_finds_a_fault_and_nothing_where_there_is_none() -> None:
    for tier, healthy, rows in TIERS:
        assert {check for check, *_ in rows} == {*tier.CHECKS}
        assert [*run_checks(tier.CHECKS, tier.CHECKS, healthy)] == []
    small = with_links(ac=1, latency=5e-5 + hosts.LEAST_EXCESS)
    assert [*run_checks(hosts.CHECKS, hosts.CHECKS, small)] == []


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(1, 2, "127.0.0.1", 0, ABOUT, {}) as listener:
        yield listener
        listener.shutdown()


class Deaf(Handler):
    """Of a host whose large packets are lost: it sends none."""

    def answer_link(self) -> None:
        for _ in range(hosts.PINGS):
            self.wfile.write(self.rfile.read(1))
        threading.Event().wait(ENOUGH)


def test_a_link_is_measured(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "TRANSFER_LIMIT", ENOUGH)
    link = hosts.measure("127.0.0.1", listener.port)
    assert link["problem"] == ""
    assert 0 < link["latency"] < math.inf
    assert link["bandwidth"] > 0
    listener.RequestHandlerClass = Deaf
    monkeypatch.setattr(hosts, "TRANSFER_LIMIT", 0.1)
    assert hosts.measure("127.0.0.1", listener.port)["problem"] == hosts.STUCK


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"ask": "all"}', b'{"ask": "link", "loud": 1}', b"\xff" * 100])
def test_what_is_no_question_gets_no_answer(line: bytes, listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), timeout=ENOUGH) as connection:
        connection.sendall(line + b"\n")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""


def test_a_port_that_is_taken_is_refused(listener: Listener) -> None:
    port = listener.port
    with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 is taken: choose another with --port"):
        hosts.listen(["127.0.0.1"], 1, port, None, [])


def test_hosts_find_each_other(start_cli: Callable[..., subprocess.Popen[str]]) -> None:
    words = ("doctor", "--hosts", "127.0.0.1,127.0.0.2", "--port", free_port(), "--check", "hosts", "--json")
    started = [start_cli(*words, "--timeout", ENOUGH) for _ in range(2)]
    ended = [json.loads(each.communicate(timeout=2 * ENOUGH)[0]) for each in started]
    assert [each.returncode for each in started] == [0, 0]
    [found] = [document["hosts"] for document in ended if "hosts" in document]
    assert (found["names"], found["silent"], len(found["links"])) == (["127.0.0.1", "127.0.0.2"], {}, 2)


def test_the_host_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four are there, which here are addresses of this machine: the second is not."""
    for limit in ("GREETING_LIMIT", "ANSWER_LIMIT", "TRANSFER_LIMIT"):
        monkeypatch.setattr(hosts, limit, ENOUGH)
    names, port = [f"127.0.0.{number}" for number in (1, 9, 2, 3)], int(free_port())
    with socket.socket() as missing:  # so that nobody takes its place
        missing.bind((names[1], port))
        first, second, third = listeners = [hosts.listen(names, 4, port, None, []) for _ in range(3)]
        assert hosts.meet(third, ENOUGH) is None
        met = hosts.meet(first, 0)
    assert met
    found = hosts.lead(first, *met, names)
    assert {pair for pair, link in found.links.items() if not link["problem"]} == {*permutations((0, 2, 3), 2)}
    assert [finding.saw for finding in run_checks(hosts.CHECKS, ["answers"], found)] == [
        "127.0.0.9 does not answer: Connection refused"
    ]
    hosts.dismiss(first, found, errors=1)
    assert [hosts.follow(each, 0) for each in (second, third)] == [1, 1]
    for each in listeners:
        each.shutdown()
        each.server_close()
