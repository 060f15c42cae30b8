"""Bars of text: as long as their sums, on one scale, and every character explained."""

from __future__ import annotations

from hypothesis import given, strategies as st
from widths import too_wide

from playground.ui.rendering import render
from playground.ui.tables import BLOCKS, bars, draw

KINDS = ("parameters", "gradients", "activations")


def test_bars_share_a_scale_and_have_a_legend() -> None:
    rows = [
        ("cpu:0", {"parameters": 4000, "gradients": 4000}),
        ("cpu:1", {"parameters": 4000, "activations": 1}),
    ]
    assert render(bars(rows, KINDS, width=8), 80).splitlines() == [
        "                                        total",
        "  device  one character: 1,000 bytes  (bytes)",
        "  cpu:0   ████▓▓▓▓                      8,000",
        "  cpu:1   ████                          4,001",
        "  █ parameters   ▓ gradients",
    ]


def test_a_narrow_terminal_shows_the_whole_bar_beside_its_name() -> None:
    lines = render(bars([("cpu:0", {"parameters": 99})], KINDS), 40).splitlines()
    assert too_wide("\n".join(lines), 40) == []
    assert lines[1].startswith("  cpu:0   █")
    assert "".join(lines).count("█") == 44 + 1  # and in the legend


def test_a_long_legend_takes_several_lines() -> None:
    kinds = [f"a kind of {name}" for name in "abcdef"]
    lines = render(bars([("cpu:0", dict.fromkeys(kinds, 1))], kinds, width=12), 80).splitlines()
    assert [line.split()[0] for line in lines[-2:]] == [BLOCKS[0], BLOCKS[4]]
    assert too_wide("\n".join(lines)) == []


def test_nothing_held_is_no_bar() -> None:
    assert "cpu:0" in render(bars([("cpu:0", {})], KINDS), 80)


@given(
    st.lists(st.integers(0, 10**9), max_size=len(BLOCKS)), st.integers(0, 10**9), st.integers(1, 60)
)
def test_a_bar_is_as_long_as_its_sum(amounts: list[int], more: int, width: int) -> None:
    longest = sum(amounts) + more
    bar = draw(amounts, longest, width)
    assert len(bar) <= width
    if longest:
        assert len(bar) == round(sum(amounts) * width / longest)
        for character, amount in zip(BLOCKS, amounts, strict=False):
            assert abs(bar.count(character) - amount * width / longest) <= 1
    assert list(bar) == sorted(bar, key=BLOCKS.index)
