"""The constants of a program, read from its text, and put into it."""

from __future__ import annotations

import ast

import pytest

from playground.base.constants import Constants, Value, put_values, read_constants

PROGRAM = b'''"""EPOCHS = 3 stands here, too."""
import os

EPOCHS = 10
BATCH_SIZE = 128  # of all ranks together
# Of plain SGD,
# without momentum.
LR: float = 0.1
OFFSET = -1
NAME = "caf\xc3\xa9"; SHUFFLE = True  # behind the second
SIZES = (
    1,
    2.5,
)  # in KiB
WORDS = "a", "b"
TWICE = 2 * EPOCHS
NOTHING = None
EMPTY = ()
A = B = 1
C, D = 1, 2
AGAIN = 1
AGAIN = 2
GROWN = 1
GROWN += 1
if os.name:
    INNER = 7  # of one host
else:
    OTHER = 8
    OTHER += 1
lower = 5
Mixed = 6


def run():
    LOCAL = 9
'''


def read(source: bytes) -> Constants:
    return read_constants(source, ast.parse(source))


def test_literals_are_read_with_their_comments() -> None:
    found = {name: (each.value, each.comment) for name, each in read(PROGRAM).literals.items()}
    assert found == {
        "EPOCHS": (10, ""),
        "BATCH_SIZE": (128, "of all ranks together"),
        "LR": (0.1, "Of plain SGD, without momentum."),
        "OFFSET": (-1, ""),
        "NAME": ("café", ""),
        "SHUFFLE": (True, "behind the second"),
        "SIZES": ((1, 2.5), "in KiB"),
        "INNER": (7, "of one host"),
    }


def test_whatever_else_is_assigned_to_capitals_is_known_with_its_line() -> None:
    lines = PROGRAM.decode().split("\n")
    computed = {name: lines[line - 1].strip() for name, line in read(PROGRAM).computed.items()}
    assert computed == {
        "WORDS": 'WORDS = "a", "b"',
        "TWICE": "TWICE = 2 * EPOCHS",
        "NOTHING": "NOTHING = None",
        "EMPTY": "EMPTY = ()",
        "A": "A = B = 1",
        "B": "A = B = 1",
        "C": "C, D = 1, 2",
        "D": "C, D = 1, 2",
        "AGAIN": "AGAIN = 2",
        "GROWN": "GROWN += 1",
        "OTHER": "OTHER += 1",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EPOCHS", 2),
        ("LR", 1e-3),
        ("OFFSET", -5),
        ("NAME", "two\nlines"),
        ("SHUFFLE", False),
        ("SIZES", (3, -4.5, 6)),
        ("SIZES", (3,)),
    ],
)
def test_a_value_takes_the_place_of_the_literal_and_every_line_keeps_its_number(
    name: str, value: Value
) -> None:
    def lines(tree: ast.Module) -> dict[str, int]:
        return {ast.unparse(node): node.lineno for node in tree.body if name not in ast.dump(node)}

    tree = ast.parse(PROGRAM)
    before = lines(tree)
    changed = put_values(tree, {name: value})
    names: dict[str, Value] = {}
    exec(compile(changed, "program", "exec"), names)
    assert names[name] == value
    assert names["TWICE"] == 2 * int(str(names["EPOCHS"]))
    assert lines(changed) == before
    own = next(node for node in changed.body if ast.unparse(node).startswith(f"{name}"))
    lines_of_literal = {node.lineno for node in ast.walk(own) if hasattr(node, "lineno")}
    assert min(lines_of_literal) == own.lineno
    assert max(lines_of_literal) <= (own.end_lineno or 0)
