"""In a world that somebody else started: whoever was lost first is named, on every rank, in one
line."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fixtures import Fork, Networks
from hosts import Host, Network
from processes import ENOUGH, by_hand, free_port, is_first_epoch
from torch.distributed import HashStore

from playground.base.connections import tcp_connections, tcp_sockets
from playground.base.errors import PeerDisconnected, RankFailed
from playground.training import prepare
from playground.world.join import describe_loss, explain
from playground.world.rendezvous import peers
from playground.world.rendezvous.environment import RankEnv, write_error_file
from playground.world.rendezvous.keys import left
from playground.world.rendezvous.peer_ends import Loss, Peer, PeerEnds, describe_end
from playground.world.rendezvous.peers import PeerWatch
from playground.world.rendezvous.rendezvous import Rendezvous

KILLED = r"(killed by SIGKILL|ended)"
"""Linux before 6.15 tells nobody but the parent, once that has asked; the fork server asks at
once."""
ENDLESS = ("sgd", "--epochs", "100000", "--batch-size", "120")


def told_by_ranks(err: str) -> list[str]:
    """What each of our sentences says, in one line, without whose it is."""
    ours = r"^playground: rank \d of \d (lost rank (?s:.*?)\)$|.*)"
    return [" ".join(each.split()) for each in re.findall(ours, err, re.MULTILINE)]


@pytest.mark.parametrize(
    ("how", "culprit", "reason"),
    [
        ("kill", 1, KILLED + " on {host}"),
        # It serves the store: on a busy machine that may be known first.
        (
            "kill",
            0,
            f"(?:{KILLED} on {{host}}|the store at .*, which it or its torchrun served, is gone)",
        ),
        ("raise", 1, "failed on {host}: ValueError: this rank has had enough"),
        ("terminate", 1, "(ended by SIGTERM|ended) on {host}"),
        ("vanish", 2, r"(exited with code 7|ended) on {host}"),
    ],
)
def test_the_others_name_the_rank_that_was_lost(
    fork_program: Fork, how: str, culprit: int, reason: str
) -> None:
    port = free_port()
    lost = f"lost rank {culprit} \\({reason.format(host=socket.gethostname())}\\)"
    ranks = [
        fork_program("joined_rank", how, culprit, **by_hand(rank, 3, port)) for rank in range(3)
    ]
    for rank, program in enumerate(ranks):
        _, err = program.communicate(timeout=ENOUGH)
        told = told_by_ranks(err)  # besides, torch logs: in these processes it is imported already
        if rank != culprit:
            assert (program.returncode, len(told)) == (1, 1)
            assert re.fullmatch(lost, told[0])
            assert "Traceback" not in err
        elif how == "raise":
            assert told == ["failed: ValueError: this rank has had enough"]
            assert "in misbehave\n" in err


def test_a_rank_that_has_lost_another_may_still_tidy_up(fork_program: Fork) -> None:
    port = free_port()
    ranks = [fork_program("joined_rank", "tidy", **by_hand(rank, 2, port)) for rank in range(2)]
    out, err = ranks[0].communicate(timeout=ENOUGH)
    assert (out, ranks[0].returncode) == ("tidy\n", 1)
    assert err.startswith("playground: rank 0 of 2 lost rank 1")


def test_torchrun_reads_the_culprit_as_the_first_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failures = {}
    for rank, error in enumerate(
        [
            PeerDisconnected(0, 2, "lost rank 1 (failed on b: ValueError: no)"),
            RankFailed(1, 2, "failed: ValueError: no"),
        ]
    ):
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        write_error_file(error)
        failures[rank] = ProcessFailure(rank, 100 + rank, 1, str(file))
    report = ChildFailedError("sgd", failures)
    assert report.get_first_failure()[0] == 1
    assert "rank 0 of 2 lost rank 1 (failed on b: ValueError: no)" in str(report)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "removed" / "0.json"))
    # which is no reason to fail of something else
    write_error_file(RankFailed(0, 2, "failed: ValueError: no"))
    assert (
        json.loads((tmp_path / "1.json").read_text())["message"]["message"]
        == "rank 1 of 2 failed: ValueError: no"
    )


def test_how_a_process_ended_is_told_to_one_that_is_not_its_parent() -> None:
    ends = {
        "kill -9 $$": "killed by SIGKILL",
        "exit 3": "exited with code 3",
        "exit 143": "ended by SIGTERM",
    }
    for command, words in ends.items():
        with subprocess.Popen(
            ["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE
        ) as process:
            pidfd = os.pidfd_open(process.pid)
            assert process.stdin
            process.stdin.close()
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
            assert describe_end(pidfd, process.pid) == words
            os.close(pidfd)


def test_shutting_down_ends_connections_and_spares_a_port() -> None:
    """In a process of its own: this one has connections to keep."""
    words = """
import socket, sys
from playground.base.connections import shut_down_connections, tcp_connections
servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
if sys.argv[1:]:
    servers[1] = socket.create_server(("::1", 0), family=socket.AF_INET6)
kept, ended = [socket.create_connection(server.getsockname()[:2]) for server in servers]
served = servers[0].accept()[0]
print(len([*tcp_connections()]))
shut_down_connections(spare_port=kept.getpeername()[1])
ended.settimeout(5)
for one, other in ((kept, served), (served, kept)):
    one.sendall(b"still here")
    print(other.recv(10))
print(ended.recv(10))
"""
    command = [sys.executable, "-c", words, *["::1"] * has_ipv6()]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == "3\nb'still here'\nb'still here'\nb''\n"


def has_ipv6() -> bool:
    """Whether this host has a loopback of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_looking_at_connections_leaves_nothing_open() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        before = len(os.listdir("/proc/self/fd"))
        assert len([*tcp_connections()]) >= 1
        assert len(os.listdir("/proc/self/fd")) == before


def test_looking_at_sockets_leaves_them_as_they_are() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.setdefaulttimeout(1)
        try:
            assert len([*tcp_sockets()]) >= 1
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(server.fileno())


def make_peer(rank: int, machine: str, pid: int = 0, port: int = 0) -> Peer:
    return Peer(rank, f"host of {rank}", machine, pid, "127.0.0.1", port)


def test_a_rank_watches_its_neighbours_on_other_hosts() -> None:
    """So each is watched from two sides, however many there are."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    ranks = [
        make_peer(rank, f"{rank}", port=server.getsockname()[1])
        for rank, server in enumerate(servers)
    ]
    ends = PeerEnds(ranks[0], ranks)
    assert sorted(peer.rank for peer in ends.sources.values()) == [1, 3]
    ends.wakeup.close()
    ends.close()
    for server in servers:
        server.close()


def test_a_rank_that_ended_before_it_was_watched_is_missed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    ranks = [make_peer(0, "here", os.getpid()), make_peer(1, "here", gone.pid)]
    ends = PeerEnds(ranks[0], ranks)
    assert ends.wait(ENOUGH) == [(ranks[1], None)]
    ends.wakeup.close()
    ends.close()


@pytest.mark.parametrize(
    ("rank", "words"), [(0, "lost rank 1 (killed)"), (1, "was given up by the others: killed")]
)
def test_a_rank_that_was_given_up_is_told_so(rank: int, words: str) -> None:
    env = RankEnv(rank=rank, size=2, local_rank=rank, local_size=2, rendezvous=Rendezvous())
    watch = PeerWatch(env, 1.0, 1.0, lambda: None)
    watch.loss = Loss([1], "killed")
    assert str(describe_loss(watch)) == f"rank {rank} of 2 {words}"


def test_an_exit_after_a_loss_says_who_was_lost() -> None:
    """As where the program's `finally` calls sys.exit. Without a loss, it stays what it is."""
    env = RankEnv(rank=0, size=2, local_rank=0, local_size=2, rendezvous=Rendezvous())
    watch, error = PeerWatch(env, 1.0, 1.0, lambda: None), SystemExit(3)
    assert explain(error, watch) is error
    watch.loss = Loss([1], "killed")
    watch.known.set()
    assert str(explain(error, watch)) == "rank 0 of 2 lost rank 1 (killed)"


def test_who_has_left_in_order_is_not_missed_and_whose_end_is_known_is_told_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "LOCAL_REPORT_TIMEOUT", 0.0)
    env = RankEnv(rank=0, size=4, local_rank=0, local_size=4, rendezvous=Rendezvous())
    watch, lost = PeerWatch(env, 1.0, 1.0, lambda: None), list[str]()
    watch.store = HashStore()
    watch.store.set(left(1), "yes")
    monkeypatch.setattr(watch, "report", lambda loss: lost.append(str(loss)))
    ends = [
        (make_peer(1, "here"), Loss([1], "exited with code 0")),
        (make_peer(2, "there"), None),
        (make_peer(3, "here"), Loss([3], "killed")),
    ]
    watch.report_ends(ends)
    unknown = "lost rank 2 (its process on host of 2 has ended)"
    assert lost == ["lost rank 3 (killed)", unknown]
    watch.closing.set()  # this rank leaves: a rank of that host tells the others
    watch.report_ends(ends)
    assert lost == ["lost rank 3 (killed)", unknown, "lost rank 3 (killed)"]


def data_in(folder: Path) -> dict[str, str]:
    """Variables by which a lesson finds digits there, and MNIST nowhere."""
    return {prepare.DATA_DIR: str(folder), prepare.MIRROR: str(folder / "nowhere")}


def start_training(network: Network, data_dir: Path) -> list[subprocess.Popen[str]]:
    """Two ranks on each host, in their first epoch or later."""
    started = [host.torchrun(2, *ENDLESS, **data_in(data_dir)) for host in network.hosts]
    assert started[0].stdout
    assert any(map(is_first_epoch, started[0].stdout)), started[0].communicate()
    return started


def find_rank(host: Host, rank: int) -> int:
    for pid in host.processes():
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no rank {rank} on {host.name}")


@pytest.mark.stress
@pytest.mark.parametrize("time_", range(5))
@pytest.mark.parametrize("culprit", range(4))
def test_a_killed_rank_is_named_first_on_every_host(
    hosts: Networks, data_dir: Path, culprit: int, time_: int
) -> None:
    network = hosts(2)
    started = start_training(network, data_dir)
    home = network.hosts[culprit // 2]
    time.sleep(time_ / 10)
    os.kill(find_rank(home, culprit), signal.SIGKILL)
    for host, torchrun in zip(network.hosts, started, strict=True):
        _, err = torchrun.communicate(timeout=ENOUGH)
        assert {*told_by_ranks(err)} == {f"lost rank {culprit} (killed by SIGKILL on {home.name})"}
        cause = err[err.index("Root Cause") :]
        if host is home:
            assert f"rank      : {culprit} " in cause
            assert "(SIGKILL)" in cause
        else:
            assert f"lost rank {culprit} (killed by SIGKILL on {home.name})" in cause


@pytest.mark.stress
def test_a_rank_that_is_busy_elsewhere_is_ended_after_a_loss(fork_program: Fork) -> None:
    port = free_port()
    busy, killed, waiting = (
        fork_program("joined_rank", "hang", 0, **by_hand(rank, 3, port)) for rank in range(3)
    )
    assert busy.stdout.readline() == "now\n"
    killed.send_signal(signal.SIGKILL)
    for program in (waiting, busy):
        _, err = program.communicate(timeout=ENOUGH)
        assert program.returncode == 1
        assert [re.sub(KILLED, "killed", line) for line in told_by_ranks(err)] == [
            f"lost rank 1 (killed on {socket.gethostname()})"
        ]


@pytest.mark.stress
def test_the_only_rank_of_a_host_is_missed_by_the_others(hosts: Networks, data_dir: Path) -> None:
    network = hosts(3)
    started = [host.torchrun(1, *ENDLESS, **data_in(data_dir)) for host in network.hosts]
    assert started[0].stdout
    assert any(map(is_first_epoch, started[0].stdout))
    os.kill(find_rank(network.hosts[1], 1), signal.SIGKILL)
    for torchrun in (started[0], started[2]):
        _, err = torchrun.communicate(timeout=ENOUGH)
        assert "of 3 lost rank 1 (its process on host-b has ended)\n" in err
