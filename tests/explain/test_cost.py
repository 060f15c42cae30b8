"""What a program's communication costs: bytes equal to the closed forms, and times where they
belong."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import costed_programs
import pytest
import torch
import torch.distributed as dist
from costed_programs import BATCH, MICROBATCHES, STEPS, WEIGHTS, WIDTH, new_model
from ranks import needs_native_calls
from torch.distributed import ProcessGroup, Work
from torch.nn.parallel import DistributedDataParallel

from playground.algorithms import ALGORITHMS, load_all_reduce
from playground.algorithms.cost_model import Task
from playground.explain.cost.log import read_ranks
from playground.explain.cost.page import to_page
from playground.explain.cost.profile import Amounts, Place, Profile, RankCosts, Row, say_share
from playground.explain.cost.report import profile_texts, to_json
from playground.tap import METHODS
from playground.testing import World
from playground.ui.rendering import render

Worlds = Callable[..., World]


def metered_in(folder: Path, program: Callable[[], object], gbit: float | None = None) -> None:
    from playground.explain.cost.meter import metered

    with metered(folder, dist.get_rank(), gbit):
        program()


def profile_of(folder: Path, size: int) -> Profile:
    return Profile((), "gloo", read_ranks(folder, size, time.monotonic()))


def sent_by_operation(profile: Profile) -> dict[str, list[float]]:
    """Bytes that each rank sends, by operation, of all lines together."""
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(profile.ranks))
    for row in profile.rows:
        for rank, amounts in enumerate(row.ranks):
            found[row.place.operation][rank] += amounts.sent
    return dict(found)


PROGRAMS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "tensor_by_library", "pipeline")


def run_programs(rank: int, size: int, folder: Path) -> None:
    for name in PROGRAMS:
        program = getattr(costed_programs, name)
        metered_in(folder / name, lambda program=program: program(new_model()))  # type: ignore[misc]


@needs_native_calls
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_are_those_of_the_closed_form(size: int, world: Worlds, tmp_path: Path) -> None:
    world(size, timeout=300).run(run_programs, tmp_path)
    sent = {name: sent_by_operation(profile_of(tmp_path / name, size)) for name in PROGRAMS}
    part = 4.0 * WEIGHTS * (size - 1) / size
    """What a rank sends to gather all parameters, or to reduce all gradients."""

    def of_each(nbytes: float) -> Any:
        return pytest.approx([nbytes] * size)

    assert sent["ddp"]["all_reduce in C++"] == of_each(STEPS * 2 * part)
    for name, gathers in {"zero1": 1, "zero2": 1, "zero3": 2}.items():
        assert sent[name]["all_gather_into_tensor"] == of_each(STEPS * gathers * part), name
        assert sent[name]["reduce_scatter_tensor"] == of_each(STEPS * part), name
    if size > 1:  # fully_shard on one rank sends nothing
        assert sent["fsdp"]["all_gather_into_tensor"] == of_each(STEPS * 2 * part)
        assert sent["fsdp"]["reduce_scatter_tensor"] == of_each(STEPS * part)
        activations = 2 * 4.0 * BATCH * WIDTH * (size - 1) / size
        both = of_each(STEPS * 2 * activations)  # in forward and in backward
        assert sent["tensor_by_library"]["all_reduce in C++"] == both
        message, last = MICROBATCHES * 4.0 * BATCH * WIDTH, size - 1
        each_way = [message * ((rank < last) + (rank > 0)) for rank in range(size)]
        assert sent["pipeline"]["send"] == pytest.approx(each_way)


def all_reduce_by_each(rank: int, size: int, folder: Path) -> None:
    for name in ALGORITHMS:
        all_reduce, tensor = load_all_reduce(name), torch.ones(240)
        all_reduce(tensor)  # the first time, ranks of some tell each other their hosts
        metered_in(folder / name, lambda: all_reduce(tensor))  # noqa: B023


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_our_all_reduces_are_counted_message_by_message(
    size: int, world: Worlds, tmp_path: Path
) -> None:
    world(size).run(all_reduce_by_each, tmp_path)
    for name, spec in ALGORITHMS.items():
        profile = profile_of(tmp_path / name, size)
        assert profile.total.calls == size, name
        if spec.cost:
            expected = spec.cost(Task(size, 960, size)).total.bytes
            assert profile.total.sent == pytest.approx(expected), name
        assert {row.place.function for row in profile.rows} == {"<lambda>"}, name


def wait_for_the_late(rank: int, size: int, folder: Path) -> None:
    def program() -> None:
        if rank == 1:
            time.sleep(0.2)
        dist.barrier()
        work: Any = dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(0.1)
        work.wait()
        ours: Any = load_all_reduce("ring")(torch.ones(4), async_op=True)
        ours.wait()

    metered_in(folder, program)


def test_time_belongs_to_the_line_that_waits(world: Worlds, tmp_path: Path) -> None:
    world(2).run(wait_for_the_late, tmp_path)
    profile = profile_of(tmp_path, 2)
    rows = {row.place.operation: row for row in profile.rows}
    assert rows["barrier"].ranks[0].waited >= 0.1
    assert rows["barrier"].total.hidden == 0
    assert rows["all_reduce"].total.hidden > 0
    assert rows["all_reduce"].total.waited == 0
    assert rows["all_reduce.wait"].total.calls == 0
    assert rows["all_reduce.wait"].place.line == rows["all_reduce"].place.line + 2
    assert rows["all_reduce (ring).wait"].total.waited > 0
    assert rows["all_reduce (ring)"].ranks[0].sent == 2 * 8
    assert {row.place.function for row in profile.rows} == {"program"}
    for rank in profile.ranks:
        assert rank.total.waited <= rank.seconds


def call_in_subgroup(rank: int, size: int, folder: Path) -> None:
    from torch.distributed import _functional_collectives as functional

    def program() -> None:
        group = dist.new_group([0, 1])
        if rank < 2:
            functional.all_reduce(torch.ones(6), "sum", group) + 1
            dist.broadcast(torch.ones(5), 1, group)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, torch.ones(3), 1 - rank),
                    dist.P2POp(dist.irecv, torch.ones(3), 1 - rank),
                ]
            )
            for work in works:
                work.wait()

    metered_in(folder, program)


@needs_native_calls
def test_groups_batches_and_functional_collectives(world: Worlds, tmp_path: Path) -> None:
    world(3).run(call_in_subgroup, tmp_path)
    sent = sent_by_operation(profile_of(tmp_path, 3))
    assert sent["all_reduce in C++"] == [24, 24, 0]
    assert sent["broadcast"] == [0, 20, 0]
    assert sent["isend"] == [12, 12, 0]
    assert sent["irecv"] == [0, 0, 0]


def are_torchs_again(rank: int, size: int, folder: Path) -> bool:
    from torch.distributed import _functional_collectives as functional

    places = [(ProcessGroup, method) for method in METHODS]
    places += [(Work, "wait"), (torch.Future, "wait"), (torch.autograd, "backward")]
    places += [(functional, "wait_tensor"), (dist.distributed_c10d, "_register_process_group")]
    before = [vars(owner)[name] for owner, name in places]
    metered_in(folder, lambda: dist.all_reduce(torch.ones(1)))
    return before == [vars(owner)[name] for owner, name in places]


def test_nothing_is_left_in_the_place_of_torchs(world: Worlds, tmp_path: Path) -> None:
    assert world(2).run(are_torchs_again, tmp_path) == [True, True]


def fork_and_call(rank: int, size: int, folder: Path) -> None:
    def program() -> None:
        if not os.fork():
            dist.group.WORLD.size()
            from playground.explain.cost import meter

            assert not meter._logs
            os._exit(0)
        os.wait()

    metered_in(folder, program)


def test_a_process_that_a_rank_forks_is_not_measured(world: Worlds, tmp_path: Path) -> None:
    world(1, fresh=True).run(fork_and_call, tmp_path)
    assert profile_of(tmp_path, 1).total == Amounts()


def test_a_rank_that_was_ended_while_it_waits_has_waited(world: Worlds, tmp_path: Path) -> None:
    from playground.explain.cost.log import file_name
    from playground.explain.cost.meter import CostLog, Meter

    log = CostLog(tmp_path / file_name(0))
    meter = Meter(log)
    row = meter.find_row("recv")
    since = time.monotonic()
    meter.stand_still(row, since)
    [rank] = read_ranks(tmp_path, 1, since + 5)
    [(place, amounts)] = rank.rows.items()
    assert (place.operation, place.file.rpartition("/")[2]) == ("recv", "test_cost.py")
    assert amounts.waited == pytest.approx(5)
    assert rank.seconds >= 5


@pytest.mark.parametrize(
    ("waits", "counted"),
    [
        ([(0, 4), (1, 5)], [4, 1]),
        ([(1, 2), (3, 4), (0, 5)], [1, 1, 3]),
        ([(0, 4), (1, 2), (0, 4)], [4, 0, 0]),
        ([(3, 4), (0, 1), (5, 5), (6, 5)], [1, 1, 0, 0]),
    ],
)
def test_waits_that_overlap_count_once(
    waits: list[tuple[float, float]], counted: list[float], tmp_path: Path
) -> None:
    from playground.explain.cost.log import file_name
    from playground.explain.cost.meter import CostLog, Issued, Meter

    meter = Meter(CostLog(tmp_path / file_name(0)))
    rows = [meter.find_row(f"broadcast {number}") for number in range(len(waits))]
    for row, (start, end) in zip(rows, waits, strict=True):
        meter.add_wait(Issued(row, float(start)), float(end))
    [rank] = read_ranks(tmp_path, 1, time.monotonic())
    assert [amounts.waited for amounts in rank.rows.values()] == counted


def wait_for_buffers(rank: int, size: int, folder: Path) -> None:
    """A forward pass broadcasts the statistics of BatchNorm, and their count: two calls."""
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4))

    def program() -> None:
        for _ in range(3):
            if rank == 0:
                time.sleep(0.2)
            model(torch.ones(3, 4))

    metered_in(folder, program)


@needs_native_calls
def test_a_rank_waits_at_most_as_long_as_it_runs(world: Worlds, tmp_path: Path) -> None:
    world(2).run(wait_for_buffers, tmp_path)
    profile = profile_of(tmp_path, 2)
    [row] = profile.rows
    assert row.total.calls == 2 * 3 * 2
    assert 0.3 <= profile.ranks[1].total.waited <= profile.ranks[1].seconds


def profile(*waited: float) -> Profile:
    """A profile of a rank that has waited so long on the lines 1, 2, … of a file."""
    rows = {
        Place("zero.py", line, "run", "all_reduce"): Amounts(1, 4, seconds, 0)
        for line, seconds in enumerate(waited, 1)
    }
    return Profile(("run", "zero.py"), "gloo", (RankCosts(0, 10.0, rows),))


@pytest.mark.parametrize(
    ("waited", "sentence"),
    [
        ((), "The program calls no operation of torch.distributed."),
        ((0.0,), "None of the run is spent waiting."),
        ((0.9, 2.7), "36% of the run is spent waiting, three quarters of it in zero.py:2."),
        ((1.0,), "10% of the run is spent waiting, all of it in zero.py:1."),
    ],
)
def test_the_answer_is_one_sentence(waited: tuple[float, ...], sentence: str) -> None:
    assert profile(*waited).conclude() == sentence


@pytest.mark.parametrize(
    ("waited", "sentence"),
    [
        ((8.9, 0.8), "Rank 1 waits 8% of its time, rank 0 89%: it waits for rank 1."),
        ((8.9, 0.8, 7.0),
         "Rank 1 waits 8% of its time, the others 70% or more: they wait for rank 1."),
        ((8.9, 0.8, 1.0), ""),
        ((0.9, 0.1), ""),
    ],
)  # fmt: skip
def test_it_is_said_for_whom_ranks_wait_if_their_shares_tell(
    waited: tuple[float, ...], sentence: str
) -> None:
    """Not of a rank that makes none of the calls in which the others wait."""
    place = Place("zero.py", 1, "run", "all_reduce")
    ranks = [
        RankCosts(rank, 10.0, {place: Amounts(1, 4, seconds, 0)})
        for rank, seconds in enumerate(waited)
    ]
    found = Profile(("run", "zero.py"), "gloo", tuple(ranks))
    assert found.conclude().endswith(f"all of it in zero.py:1. {sentence}".rstrip())
    ranks[1] = replace(ranks[1], rows={})
    apart = Profile(("run", "zero.py"), "gloo", tuple(ranks))
    assert "wait for" not in apart.conclude()


def test_a_share_has_a_name_only_near_one() -> None:
    assert [say_share(share) for share in (0.5, 0.66, 0.41)] == [
        "half of it",
        "two thirds of it",
        "41% of it",
    ]


def test_the_most_expensive_comes_first() -> None:
    rows: list[Row] = profile(0.1, 3.0, 0.0).rows
    assert [row.place.line for row in rows] == [2, 1, 3]
    assert '"line": 2' in to_json(profile(0.1, 3.0)).split('"rows"')[1].split("}")[0]


def test_the_page_asks_for_nothing_and_escapes_what_it_shows(tmp_path: Path) -> None:
    script = tmp_path / "a<b.py"
    script.write_text("x = 1 < 2\ndist.all_reduce(x)\n")
    place = Place("a<b.py", 2, "<module>", "all_reduce", str(script))
    found = Profile(("run", "a<b.py"), "gloo", (RankCosts(0, 1.0, {place: Amounts(1, 8, 0.5)}),))
    page = to_page(found)
    assert "x = 1 &lt; 2" in page
    assert "a<b" not in page
    assert "<script" not in page
    assert "http" not in page
    assert "50.0%" in page


@pytest.mark.parametrize(
    ("operation", "hidden", "shown"),
    [("barrier", 0.0, (False, False)), ("all_reduce in C++", 0.1, (True, True))],
)
def test_a_column_of_zeros_is_left_out_and_what_is_shown_is_explained(
    operation: str, hidden: float, shown: tuple[bool, bool]
) -> None:
    place = Place("train.py", 3, "run", operation)
    rank = RankCosts(0, 1.0, {place: Amounts(1, 8, 0.5, hidden)})
    text = render(profile_texts(Profile(("run",), "gloo", (rank,))), 80)
    assert ("hidden" in text, "in C++: torch makes these calls" in text) == shown
