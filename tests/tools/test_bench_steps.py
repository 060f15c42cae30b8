"""`bench steps`: every gradient synchronisation of ours, and DistributedDataParallel."""

from __future__ import annotations

import json

import pytest
from fixtures import Run

from playground.training.grad_syncs import DDP, GRAD_SYNCS, SPARSE
from playground.training.step_settings import ON_NO_LINK

QUICK = ("bench", "steps", "--steps", 2, "--batch-size", 16)
ON_DIGITS = ("--dataset", "digits")


def test_every_way_is_timed_beside_ddp(run_cli: Run, few_digits: None) -> None:
    shown = run_cli(*QUICK, *ON_DIGITS, "--all-reduce", "ring", "--json")
    assert shown.code == 0, shown.err
    document = json.loads(shown.out)
    variants = {variant["name"]: variant for variant in document["variants"]}
    assert [*variants] == [*GRAD_SYNCS, DDP]
    assert (document["all_reduce"], document["timed_steps"]) == ("ring", 2)
    assert variants[DDP]["speed_to_ddp"] == 1
    assert all(variant["p50"] > 0 for variant in variants.values())
    assert max(variant["difference_to_ddp"] for variant in variants.values()) < 1e-6


def test_rows_of_embeddings_are_timed_over_a_link(run_cli: Run) -> None:
    shown = run_cli(
        "bench", "steps", "--model", "bert", "--steps", 1, "--batch-size", 4, "--link", 10, "--json"
    )
    assert shown.code == 0, shown.err
    names = {variant["name"] for variant in json.loads(shown.out)["variants"]}
    assert names == {*GRAD_SYNCS, SPARSE, DDP} - {*ON_NO_LINK}


def test_the_last_line_says_which_was_fastest(run_cli: Run, few_digits: None) -> None:
    shown = run_cli(*QUICK, *ON_DIGITS, "--link", 1)
    assert shown.code == 0, shown.err
    assert "Measured: the fastest, " in " ".join(shown.out.split())


@pytest.mark.parametrize("words", [("-n", 2), ("--json",), ("-b", "1K")])
def test_options_stand_behind_the_subcommand(words: tuple[object, ...], run_cli: Run) -> None:
    refused = run_cli("bench", *words, "steps")
    assert (refused.code, refused.out) == (2, "")
    assert f"write bench steps {words[0]}" in refused.err


def test_bench_names_it(run_cli: Run) -> None:
    shown = run_cli("bench", "--help")
    assert "steps  time a training step with each gradient synchronisation" in shown.out
