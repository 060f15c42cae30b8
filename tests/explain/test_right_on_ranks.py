"""Silent mistakes on real ranks: wrong programs are named with their cause and line, right ones are
not accused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import reported_mistakes
import silent_mistakes
import torch.distributed as dist
from ranks import needs_native_calls
from silent_mistakes import Wrong

from playground.explain.right.facts import RankFacts
from playground.explain.right.finding import Finding, Level
from playground.explain.right.reading import read_ranks
from playground.explain.right.report import tell
from playground.explain.right.rules import find_mistakes
from playground.site.texts import CHAPTERS
from playground.testing import World

Worlds = Callable[..., World]
Program = Callable[[], None]
WRONG = (*silent_mistakes.WRONG, *reported_mistakes.WRONG)
RIGHT = (*silent_mistakes.RIGHT, *reported_mistakes.RIGHT)
PROGRAMS = [*(wrong.program for wrong in WRONG), *RIGHT]


def check(rank: int, size: int, programs: Sequence[Program], folder: Path) -> None:
    from playground.explain.right.observer import checked

    for program in programs:
        with checked(folder / program.__name__, rank):
            program()
            dist.barrier()


@pytest.fixture(scope="module")
def facts(world: Worlds, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RankFacts]]:
    """What two ranks have seen of each program, by its name."""
    folder = tmp_path_factory.mktemp("right")
    world(2, timeout=300).run(check, PROGRAMS, folder)
    return {each.__name__: read_ranks(folder / each.__name__, 2) for each in PROGRAMS}


def find(facts: dict[str, list[RankFacts]], program: Program) -> list[Finding]:
    seen = facts[program.__name__]
    assert [each.unknown for each in seen] == ["", ""]
    return find_mistakes(seen)


def parameters(wrong: Wrong) -> Any:
    """Equal batches are seen by the gradients that DistributedDataParallel is about to average."""
    marks = [needs_native_calls] if wrong.rule == "E1-batches" else []
    return pytest.param(wrong, id=str(wrong), marks=marks)


@pytest.mark.parametrize("wrong", [parameters(wrong) for wrong in WRONG])
def test_a_wrong_program_is_named_with_its_cause_and_line(
    wrong: Wrong, facts: dict[str, list[RankFacts]]
) -> None:
    [found] = find(facts, wrong.program)
    assert (found.rule, found.level) == (wrong.rule, wrong.level)
    assert tell(found).startswith(f"playground: {wrong.level.value} [")
    module = (wrong.marked or wrong.program).__module__
    assert found.where == f"{module}.py:{wrong.line}"


def test_the_page_has_each_mistake_in_the_column_of_its_level() -> None:
    """That of the surest program: with less evidence it is told at a lower one."""
    text = CHAPTERS["run"].read_text(encoding="utf-8")
    head, *rows = re.findall(r"^\|.*", text.partition("What is looked at, and")[2], re.MULTILINE)
    columns = [each.partition(":")[0].strip() for each in head.split("|")[2:-1]]
    assert columns == [*Level]
    on_page: dict[str, Level] = {}
    for row in rows:
        for level, cell in zip(Level, row.split("|")[2:-1], strict=True):
            on_page |= dict.fromkeys(re.findall(r"\b[A-Z]\d+(?:-\w+)+", cell), level)
    surest: dict[str, Level] = {}
    for each in sorted(WRONG, key=lambda each: [*Level].index(each.level)):
        surest.setdefault(each.rule, each.level)
    assert {rule: on_page.get(rule) for rule in surest} == surest


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_a_right_program_is_not_accused(
    program: Program, facts: dict[str, list[RankFacts]]
) -> None:
    assert find(facts, program) == []
