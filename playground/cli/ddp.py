"""The command `ddp`: training with DistributedDataParallel, or the lab that takes it apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from playground.cli.asked import EVERYTHING, named, names_option
from playground.cli.options import Finite, help_of, options, speaker, world_options
from playground.cli.recipe import check_shares, prepared, training_options
from playground.cli.training import train_and_show
from playground.lessons import LESSONS, about, by_step, module_of, run_steps
from playground.runtime import server
from playground.runtime.entry import World
from playground.runtime.errors import Impossible
from playground.show import ddp_lab as show, results

LESSON = LESSONS["ddp"]
PARTS = {
    "buckets": "ddp-lab", "hooks": "ddp-lab", "accumulation": "ddp-lab",
    "uneven_inputs": "ddp-lab-inputs", "sampler": "ddp-lab-inputs",
}  # fmt: skip
"""In order; and the module of lessons that each is in."""
SHOWN = {
    "buckets": "the buckets that DDP built",
    "hooks": "what communication hooks save and what they cost",
    "accumulation": "the messages that no_sync spares",
    "uneven_inputs": "how Join lets ranks be done at different times",
    "sampler": "who gets which sample",
}
HOOKS = ("none", "fp16", "bf16", "powersgd")
CAPS = {"net": (0.001, 0.02, 25.0), "resnet18": (1.0, 5.0, 25.0)}
"""Where none are asked for: such that the model has several buckets, few, and one or as DDP has them by default."""
STEPS, ACCUMULATED = 5, 4
FOR_PARTS = {
    "bucket_caps": ("buckets", "hooks", "accumulation", "uneven_inputs"), "static_graph": ("buckets",),
    "gradient_as_bucket_view": ("buckets",), "comm_hooks": ("hooks",), "steps": ("buckets", "hooks"),
    "accumulate": ("accumulation",),
}  # fmt: skip
"""Which parts an option has a meaning for, if not for all."""
LAB = ("lab", "only", "model", *(name for name in FOR_PARTS if name != "accumulate"))
"""Options any of which asks for the lab."""
FOR_TRAINING = ("epochs", "loader")
cap_type = Finite(0, 1e6, min_open=True)


def read_caps(ctx: click.Context, param: click.Parameter, text: str | None) -> list[float]:
    """Numbers with commas between them, each once."""
    words = dict.fromkeys(text.split(",")) if text is not None else ()
    return [cap_type.convert(word.strip(), param, ctx) for word in words]


lab_options = options(
    click.option("--lab", is_flag=True, help="Take DDP apart instead of training. So does every option below."),
    click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="Only this part; may be repeated."),
    click.option("--model", type=click.Choice(list(CAPS)), show_default="net", help="What is trained in the lab."),
    click.option(
        "--bucket-cap-mb", "bucket_caps", callback=read_caps, metavar="MB,…", show_default="by model",
        help="Sizes of buckets to compare; the last one holds for the other parts.",
    ),
    click.option("--static-graph", is_flag=True, help="buckets: tell DDP that every backward is the same."),
    click.option("--gradient-as-bucket-view", is_flag=True, help="buckets: let gradients be views of buckets."),
    names_option("--comm-hook", "comm_hooks", known=HOOKS, usual=(EVERYTHING,), about="hooks"),
    click.option("--steps", type=click.IntRange(1), show_default=str(STEPS), help="To time, or to train with a hook."),
)  # fmt: skip


@click.command(LESSON.name, help=help_of(LESSON.name), short_help=LESSON.teaches)
@world_options
@training_options
@lab_options
@click.pass_context
def command(ctx: click.Context, /, **asked: Any) -> None:
    lab = {name: asked.pop(name) for name in LAB}
    if not any(lab.values()):
        train_and_show(LESSON, **asked)
        return
    parts = [part for part in PARTS if part in (lab["only"] or PARTS)]
    check_given(ctx, parts)
    if ctx.get_parameter_source("accumulate") is ParameterSource.DEFAULT:
        asked["accumulate"] = ACCUMULATED
    take_apart(parts, lab_of(lab), **asked)


def check_given(ctx: click.Context, parts: Sequence[str]) -> None:
    """Raise `Impossible` for an option that nothing of what is asked for would heed."""
    given = {
        param.name: param.opts[0]
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
    }
    for name in FOR_TRAINING:
        if name in given:
            raise Impossible(f"{given[name]} is for training, the lab does without: leave it out")
    for name, meant in FOR_PARTS.items():
        if name in given and not set(meant) & set(parts):
            raise Impossible(f"{given[name]} changes nothing in {' and '.join(parts)}: it is for {', '.join(meant)}")


def lab_of(lab: dict[str, Any]) -> dict[str, Any]:
    """Options as fields of `Lab`."""
    model, words = lab["model"] or "net", lab["comm_hooks"] or (EVERYTHING,)
    return {
        "model": model,
        "caps": list(lab["bucket_caps"] or CAPS[model]),
        "static_graph": lab["static_graph"],
        "gradient_as_bucket_view": lab["gradient_as_bucket_view"],
        "hooks": list(named(HOOKS, ("none", *words))),
        "required": [name for name in words if name in HOOKS],
        "steps": lab["steps"] or STEPS,
    }


def check_samples(model: str, batch_size: int, size: int) -> None:
    """Raise `Impossible` for a batch of which a rank gets too little."""
    check_shares(size, batch_size)
    if model == "resnet18" and batch_size < 2 * size:
        raise Impossible(
            f"--batch-size {batch_size} for {size} ranks: BatchNorm in resnet18 needs two samples on each, "
            f"so at least {2 * size}"
        )


def take_apart(
    parts: Sequence[str], lab: dict[str, Any], size: int | None, backend: str, timeout: float, init_method: str | None,
    as_json: bool, dataset: str, data_dir: Path, mirror: str | None, limit: int | None, **recipe: Any,
) -> None:  # fmt: skip
    """Run the parts of the lab and show them. `recipe`: fields of `Settings`."""
    started = time.perf_counter()
    world = World(size, usual_size=LESSON.ranks, backend=backend, timeout=timeout, init_method=init_method)
    check_samples(lab["model"], recipe["batch_size"], world.size)
    server.preload(*(f"playground.lessons.{module_of(lesson)}" for lesson in PARTS.values()))
    if lab["model"] == "resnet18":
        server.preload("torchvision.models")
    world.warm_up()
    settings, data = prepared(dataset, data_dir, mirror, limit)
    say = speaker(world, silent=as_json)
    say(f"{LESSON.name}: {world}, {results.data_text(data)}; the lab, on {lab['model']}")
    by_part = by_step(list(parts), world.run(start, parts, settings | recipe, lab))
    for part, ranks in by_part.items():
        say(show.part(part, about(PARTS[part])[part], ranks))
    say(f"\nShown: {', '.join(SHOWN[part] for part in parts)}.")
    if as_json and world.speaks:
        click.echo(results.document(LESSON.name, world, started, by_part, dataset=data, lab=lab))


def start(rank: int, size: int, parts: Sequence[str], settings: dict[str, Any], lab: dict[str, Any]) -> list[Any]:
    """What a rank runs, found only there, where torch is: what it gets from each part."""
    from playground.lab.trainee import Lab
    from playground.runtime.agreement import check_agreed
    from playground.training.settings import Settings

    check_agreed({**settings, **lab, "parts": parts, "folder": None})
    more = (Lab(settings=Settings(**settings), **lab),)
    return [run_steps(rank, size, PARTS[part], [part], settings["seed"], more)[0] for part in parts]
