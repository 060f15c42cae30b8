"""The DDP lab: what it reports of buckets, hooks, no_sync, Join and samplers, held against oracles of our own."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from playground.lessons.ddp.ddp_run import DDPRun, build_model, build_run, measure_difference, record_messages
from playground.lessons.ddp.lab import checkpoint, hooks, refusal, run_lab
from playground.lessons.ddp.page import part_texts
from playground.lessons.ddp.settings import (
    HOOKS,
    PARTS,
    AccumulationResult,
    CheckpointResult,
    Difference,
    HookResult,
    LabSettings,
    Message,
    RefusedHook,
    ResumedRun,
    SentBucket,
    check_buckets,
    check_replicas,
)
from playground.runtime import PlaygroundError, RankFailed, UsageError
from playground.runtime.backends import BACKENDS
from playground.runtime.launcher.server import preload
from playground.runtime.remote import Remote, remote
from playground.testing import World
from playground.training.gradients import buckets
from playground.training.models import MODELS
from playground.training.net import Net
from playground.training.partition import share
from playground.training.replicas import flat
from playground.training.settings import TrainingSettings

RUN_LAB = remote("playground.lessons.ddp.lab:run_lab")

preload(RUN_LAB.module, *(part.code.module for part in PARTS.values()))

Worlds = Callable[..., World]
Lab = Callable[..., list[Any]]
SIZES = {name: param.nbytes for name, param in Net().named_parameters()}
"""Bytes of each parameter of Net, in the order of its layers."""


@pytest.fixture
def lab(run_cli: Callable[..., Any], data_dir: Path) -> Lab:
    """Run one part; what its ranks have to say."""

    def run(name: str, *words: Any) -> list[Any]:
        data = ["--dataset", "digits", "--data-dir", data_dir, *(["--batch-size", 16] if name != "sampler" else [])]
        shown = run_cli("ddp", "--only", name, *data, *words, "--json")
        assert shown.code == 0, shown.err
        [step] = json.loads(shown.out)["steps"]
        assert step["name"] == name
        ranks: list[Any] = step["ranks"]
        return ranks

    return run


def cut(order: list[str], cap: float) -> list[list[str]]:
    """The oracle: gradients in the order in which they get ready, a bucket full once it holds its cap."""
    left = iter(order)
    tensors = [torch.empty(SIZES[name] // 4) for name in order]
    return [[next(left) for _ in bucket] for bucket in buckets(tensors, cap * 2**20)]


@pytest.mark.parametrize(("size", "static", "since"), [(1, [], 2), (2, ["--static-graph"], 3), (3, [], 2)])
def test_buckets_are_what_ddp_is_known_to_build(size: int, static: list[str], since: int, lab: Lab) -> None:
    caps = [0.001, 0.02, 25.0]
    ranks = lab("buckets", "-n", size, "--bucket-cap-mb", "0.001,0.02,25", "--steps", 2, *static)
    assert len(ranks) == size
    assert all(rank == ranks[0] for rank in ranks)
    order = ranks[0]["order"]
    assert sorted(order) == sorted(SIZES)
    assert order.index("fc2.weight") < order.index("fc1.weight") < order.index("conv1.weight"), "last layer first"
    assert [row["bucket_cap_mb"] for row in ranks[0]["caps"]] == caps
    for cap, row in zip(caps, ranks[0]["caps"], strict=True):
        [first] = row["first"]
        assert (first["bytes"], first["ready"], sorted(first["parameters"])) == (87_360, 8, sorted(SIZES))
        assert [bucket["parameters"] for bucket in row["rebuilt"]] == cut(order, cap)
        assert [bucket["bucket"] for bucket in row["rebuilt"]] == list(range(len(row["rebuilt"])))
        for bucket in row["rebuilt"]:
            assert bucket["bytes"] == sum(SIZES[name] for name in bucket["parameters"])
        lengths = [len(bucket["parameters"]) for bucket in row["rebuilt"]]
        assert [bucket["ready"] for bucket in row["rebuilt"]] == list(accumulate(lengths)), "each leaves at once"
        assert row["rebuilt_before"] == since
        assert row["seconds"] > 0
    assert [len(row["rebuilt"]) for row in ranks[0]["caps"]] == [5, 3, 1]


def test_views_of_buckets_need_no_memory_of_their_own(lab: Lab) -> None:
    [rank, _] = lab("buckets", "--bucket-cap-mb", "0.02", "--steps", 1, "--gradient-as-bucket-view")
    held = {row["gradient_as_bucket_view"]: (row["gradients"], row["outside"]) for row in rank["memory"]}
    assert held == {False: (87_360, 87_360), True: (87_360, 0)}


def thin() -> int:
    """The oracle: bytes of the two thin matrices of each matrix of Net, of rank one, and of its vectors."""
    shapes = [(len(param), param.numel() // len(param)) for param in Net().parameters()]
    return sum(4 * (rows + columns if columns > 1 else rows) for rows, columns in shapes)


@pytest.mark.parametrize(("size", "caps"), [(1, "25"), (3, "0.001"), (2, "0.02")])
def test_hooks_send_less_and_err_more(size: int, caps: str, lab: Lab) -> None:
    ranks = lab("hooks", "-n", size, "--bucket-cap-mb", caps, "--steps", 3)
    assert all(rank == ranks[0] for rank in ranks)
    rows = {row.pop("hook"): row for row in ranks[0]}
    assert list(rows) == ["none", "fp16", "bf16", "powersgd"]
    sent = {name: (row["types"], row["bytes"]) for name, row in rows.items()}
    assert sent == {
        "none": (["float32"], 87_360), "fp16": (["float16"], 43_680), "bf16": (["bfloat16"], 43_680),
        "powersgd": (["float32"], thin()),
    }  # fmt: skip
    assert [row["messages"] // rows["none"]["messages"] for row in rows.values()] == [1, 1, 1, 3]
    wrong = [row["gradient"]["relative"] for row in rows.values()]
    assert wrong == sorted(wrong)
    assert wrong[0] < 2**-20, "rounding of float32"
    assert 2**-14 < wrong[1] < 2**-9, "fp16 rounds to 11 bits"
    assert 2**-11 < wrong[2] < 2**-7, "bf16 rounds to 8 bits"
    assert 0.1 < wrong[3] < 2
    assert rows["none"]["parameters"] == {"max": 0, "relative": 0}
    apart = [row["parameters"]["max"] for row in rows.values()]
    assert apart == sorted(apart)
    assert apart[1] > 0
    assert all(2 < row["loss"] < 3 for row in rows.values()), "ten classes, hardly trained"


def test_only_the_hooks_asked_for_beside_none(lab: Lab) -> None:
    assert [row["hook"] for row in lab("hooks", "--comm-hook", "bf16,fp16", "--steps", 1)[0]] == [
        "none",
        "fp16",
        "bf16",
    ]


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """What the backend says of types; and what an all-reduce of ones leaves after that."""

    float32: str
    float8: str
    after: list[float]


def refusals(rank: int, size: int) -> Refusals:
    words = [refusal(getattr(torch, name)) for name in ("float32", "float8_e4m3fn")]
    after = torch.ones(3)
    dist.all_reduce(after)
    return Refusals(float32=words[0], float8=words[1], after=after.tolist())


def small_lab(folder: Path, **changes: Any) -> LabSettings:
    """A lab with batches that cannot be shared out evenly."""
    defaults = {"caps": (25.0,), "hooks": ("none",), "steps": 1}
    return LabSettings(training=TrainingSettings(folder=folder, batch_size=7), **{**defaults, **changes})


def a_hook_that_is_refused(rank: int, size: int, folder: Path, required: bool) -> list[HookResult | RefusedHook]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HOOKS, "fp8", replace(HOOKS["none"], name="fp8", dtype="float8_e4m3fn"))
        return hooks(rank, size, small_lab(folder, hooks=("none", "fp8"), required=("fp8",) * required))


def test_what_the_backend_refuses_is_reported(world: Worlds, digits_folder: Path) -> None:
    for outcome in world(2).run(refusals):
        assert outcome.float32 == ""
        assert outcome.float8
        assert outcome.after == [2.0, 2.0, 2.0]
    for plain, refused in world(2).run(a_hook_that_is_refused, digits_folder, False):
        assert isinstance(plain, HookResult)
        assert plain.hook == "none"
        assert refused == RefusedHook(hook="fp8", refused=outcome.float8)
        texts = part_texts(PARTS["hooks"], [[plain, refused]])
        assert f"  fp8 is refused here: {refused.refused}" in texts
    with pytest.raises(UsageError, match="--comm-hook fp8: refused here") as caught:
        world(2).run(a_hook_that_is_refused, digits_folder, True)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_part_that_the_backend_refuses_says_so() -> None:
    assert part_texts(PARTS["sampler"], [{"refused": "no"}] * 2)[-1] == "  the backend refuses: no"


def register_hook_that_averages_nothing(model: DistributedDataParallel) -> None:
    def keep(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, lambda state, bucket: keep(bucket))


def a_hook_that_averages_nothing(rank: int, size: int, folder: Path) -> None:
    """A new hook takes a function and an entry in the table."""
    code = Remote(__name__, register_hook_that_averages_nothing.__name__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HOOKS, "own", replace(HOOKS["none"], name="own", code=code))
        hooks(rank, size, small_lab(folder, hooks=("none", "own")))


def test_a_hook_that_averages_nothing_is_found_out(world: Worlds, digits_folder: Path) -> None:
    with pytest.raises(PlaygroundError, match=r"with this hook replicas differ by up to .*: they must not at all"):
        world(2).run(a_hook_that_averages_nothing, digits_folder)


@dataclass(frozen=True, kw_only=True)
class ExactMean:
    to_one_process: float
    """The largest difference between a run's exact mean and the gradient of one process with the whole batch."""
    to_ddp: float
    """And to what DDP leaves."""
    has_share: bool
    """Whether this rank's part of the batch has as many samples as it should."""
    largest: float
    """Number of elements of the gradient."""


def exact_mean(rank: int, size: int, folder: Path) -> ExactMean:
    training = TrainingSettings(folder=folder, batch_size=7)
    run = DDPRun(build_model("net", training.seed).double().eval(), training, 25)
    mean = run.exact_mean(1)
    images, labels = run.images.__getitems__(range(7, 14))
    alone = build_model("net", training.seed).double().eval()
    F.nll_loss(alone(images.double()), labels).backward()
    whole = flat(param.grad for param in alone.parameters())
    run.backward(1)
    return ExactMean(
        to_one_process=(mean - whole).abs().max().item(),
        to_ddp=(mean - run.gradients()).abs().max().item(),
        has_share=len(run.batch(1)[1]) == share(7, rank, size),
        largest=whole.abs().max().item(),
    )


@pytest.mark.parametrize("size", [1, 3])
def test_the_exact_mean_is_the_gradient_of_the_whole_batch(size: int, world: Worlds, digits_folder: Path) -> None:
    for outcome in world(size).run(exact_mean, digits_folder):
        assert outcome.to_one_process < 1e-14
        assert outcome.to_ddp < 1e-14
        assert outcome.has_share
        assert outcome.largest > 1e-3


def masks(rank: int, size: int, folder: Path) -> list[float]:
    """Losses with dropout: of a batch twice, and of another."""
    run = build_run(small_lab(folder))
    return [run.backward(number) for number in (0, 0, 1)]


def test_comparisons_have_the_same_dropout_masks(world: Worlds, digits_folder: Path) -> None:
    for first, again, other in world(2).run(masks, digits_folder):
        assert first == again != other


def step_and_backward(rank: int, size: int, folder: Path) -> list[bool]:
    """Whether a step leaves the gradients of its backward, and whether it changes the parameters."""
    stepped, backed = build_run(small_lab(folder)), build_run(small_lab(folder))
    before = stepped.parameters()
    losses = stepped.step(0), backed.backward(0)
    return [
        losses[0] == losses[1],
        torch.equal(stepped.gradients(), backed.gradients()),
        torch.equal(before, backed.parameters()),
        not torch.equal(before, stepped.parameters()),
    ]


def test_a_step_is_a_backward_and_the_optimizer(world: Worlds, digits_folder: Path) -> None:
    assert world(2).run(step_and_backward, digits_folder) == [[True] * 4] * 2


def test_differences_of_known_values() -> None:
    difference = measure_difference(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    assert difference.max == 0.5
    assert difference.relative == pytest.approx(0.1)


def test_verdicts() -> None:
    """What a notebook that runs an experiment is given too."""
    nan = float("nan")
    assert [Difference(max=1, relative=value).is_rounding for value in (0.0, 1e-15, 1e-3, nan)] == [1, 1, 0, 0]
    wrong = AccumulationResult(way="all send", batches=2, messages=2, difference=Difference(max=1, relative=nan))
    with pytest.raises(PlaygroundError, match="all send: gradients differ by nan, more than rounding does"):
        wrong.check()
    ends = [ResumedRun(loaded=loaded, difference=Difference(max=1, relative=1)) for loaded in ("model", "all")]
    with pytest.raises(PlaygroundError, match="resumed from the checkpoint, parameters differ by up to 1 from those"):
        CheckpointResult(steps=1, written=8, read=8, device="cpu", resumed=ends).check()
    check_replicas(0.0, "after Join")
    for difference in (1e-9, nan):
        with pytest.raises(PlaygroundError, match=f"after Join replicas differ by up to {difference}"):
            check_replicas(difference, "after Join")
    one, other = (SentBucket(bucket=0, bytes=8, ready=1, parameters=[name]) for name in ("weight", "bias"))
    check_buckets([[one], [one]])
    with pytest.raises(PlaygroundError, match="the ranks' buckets differ"):
        check_buckets([[one], [other]])


def record(rank: int, size: int) -> tuple[list[Message], bool]:
    """What is recorded of two messages, and not of the third; whether all_reduce is then what it was."""
    real = dist.all_reduce
    with record_messages() as recorded:
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(2, dtype=torch.float16), async_op=True).wait()
    dist.all_reduce(torch.ones(1))
    return recorded, dist.all_reduce is real


def test_messages_are_recorded_while_asked(world: Worlds) -> None:
    for recorded, restored in world(2).run(record):
        assert recorded == [Message(type="float32", bytes=20), Message(type="float16", bytes=4)]
        assert restored


@pytest.mark.parametrize(("size", "many", "cap", "messages"), [(1, 2, 25, 1), (2, 4, 0.02, 3), (3, 3, 0.001, 5)])
def test_no_sync_spares_messages_and_changes_nothing(size: int, many: int, cap: float, messages: int, lab: Lab) -> None:
    cap = 2 * cap if cap < 1 else cap  # in float64 each gradient has twice the bytes
    for rows in lab("accumulation", "-n", size, "--accumulate", many, "--bucket-cap-mb", cap):
        assert [row["batches"] for row in rows] == [1, many, many]
        assert [row["messages"] for row in rows] == [messages, many * messages, messages]
        assert rows[0]["difference"] == {"max": 0, "relative": 0}
        assert all(row["difference"]["relative"] < 1e-14 for row in rows)


def test_four_batches_by_default(lab: Lab) -> None:
    assert [row["batches"] for row in lab("accumulation", "-n", 1)[0]] == [1, 4, 4]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_join_lets_ranks_be_done_at_different_times(size: int, lab: Lab) -> None:
    ranks = lab("uneven_inputs", "-n", size)
    assert [rank["batches"] for rank in ranks] == list(range(3, 3 + size))
    assert [rank["steps"] for rank in ranks] == list(range(3, 3 + size))
    assert [rank["messages"] for rank in ranks] == [2 + size] * size, "one bucket a step, answered by all"
    assert [rank["difference"] for rank in ranks] == [0.0] * size
    assert [rank["without_joining"]["steps"] for rank in ranks] == [3] * size
    assert [bool(rank["without_joining"]["says"]) for rank in ranks] == [size > 1] * size


@pytest.mark.stress
def test_join_with_batch_norm(lab: Lab) -> None:
    ranks = lab("uneven_inputs", "--model", "resnet18", "--batch-size", 4)
    assert [(rank["steps"], rank["difference"]) for rank in ranks] == [(3, 0.0), (4, 0.0)]


@pytest.mark.parametrize(("size", "cap"), [(1, "25"), (3, "0.02"), pytest.param(4, "25", marks=pytest.mark.stress)])
def test_training_goes_on_from_a_checkpoint(size: int, cap: str, lab: Lab) -> None:
    ranks = lab("checkpoint", "-n", size, "--steps", 3, "--bucket-cap-mb", cap)
    least = 2 * sum(SIZES.values())
    assert [rank["written"] > least for rank in ranks] == [True] + [False] * (size - 1)
    assert [rank["written"] for rank in ranks[1:]] == [0] * (size - 1)
    assert [rank["read"] for rank in ranks] == [ranks[0]["written"]] * size
    for rank in ranks:
        without_momentum, whole = rank["resumed"]
        assert whole == {"loaded": "model, optimizer", "difference": {"max": 0.0, "relative": 0.0}}
        assert without_momentum["loaded"] == "model"
        assert without_momentum["difference"]["max"] > 1e-5


def test_without_momentum_there_is_nothing_to_save_but_the_model(lab: Lab) -> None:
    for rank in lab("checkpoint", "--momentum", 0, "--steps", 2):
        assert [row["difference"]["max"] for row in rank["resumed"]] == [0.0, 0.0]


def checkpoint_in(rank: int, size: int, folder: Path, place: Path, seen: bool) -> list[str]:
    """What is left in `place`, where the checkpoint was. Rank 1 sees it there, or does not, as on another host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place))
        if rank == 1 and not seen:
            patch.setattr(Path, "exists", lambda path: False)
        assert checkpoint(rank, size, small_lab(folder)).read
    dist.barrier()
    return [path.name for path in place.glob("playground-*")]


def test_a_checkpoint_must_be_seen_by_all_and_is_removed(world: Worlds, digits_folder: Path, tmp_path: Path) -> None:
    assert world(2).run(checkpoint_in, digits_folder, tmp_path, True) == [[], []]
    with pytest.raises(UsageError, match=rf"^checkpoint: not all ranks see {tmp_path}/.*: set TMPDIR to a folder that"):
        world(2).run(checkpoint_in, digits_folder, tmp_path, False)


def watched_run(rank: int, size: int, folder: Path) -> int:
    """How often a run of the lab asks its device for deterministic kernels."""
    asked: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BACKENDS["gloo"], "use_deterministic_kernels", lambda: asked.append(None))
        build_run(small_lab(folder))
    return len(asked)


def test_runs_that_are_compared_bit_by_bit_use_deterministic_kernels(world: Worlds, digits_folder: Path) -> None:
    assert world(2).run(watched_run, digits_folder) == [1, 1]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_who_gets_which_sample(size: int, lab: Lab) -> None:
    ranks = lab("sampler", "-n", size, "--seed", 5)
    ways = {rows[0]["way"]: [row["mine"] for row in rows] for rows in zip(*ranks, strict=True)}
    samples = 10 if 10 % size else 11
    for rank in range(size):
        theirs = DistributedSampler(range(samples), size, rank, seed=5)
        assert ways["no set_epoch, epoch 0"][rank] == ways["no set_epoch, epoch 1"][rank] == list(theirs)
        theirs.set_epoch(1)
        assert ways["set_epoch(1)"][rank] == list(theirs)
        dropping = DistributedSampler(range(samples), size, rank, seed=5, drop_last=True)
        assert ways["drop_last"][rank] == list(dropping)
    assert ways["set_epoch(0)"] != ways["set_epoch(1)"]
    for row in ranks[0]:
        counts = Counter(place for mine in ways[row["way"]] for place in mine)
        assert row["doubled"] == sorted(place for place, count in counts.items() if count == 2)
        assert row["left_out"] == sorted(set(range(samples)) - set(counts))
    padding, rest = -samples % size, samples % size
    assert [len(row["doubled"]) for row in ranks[0]] == [padding] * 4 + [0, 0]
    assert [len(row["left_out"]) for row in ranks[0]] == [0] * 4 + [rest, 0]


def test_the_lab_shows_its_parts_in_order(run_cli: Callable[..., Any], data_dir: Path) -> None:
    shown = run_cli("ddp", "--lab", "--dataset", "digits", "--data-dir", data_dir, "--steps", 1)
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[0].startswith("ddp: gloo on cpu, 2 ranks x ")
    assert lines[2] == "lab: on the model net"
    assert [line.split(":")[0] for line in lines if line.split(":")[0] in PARTS] == list(PARTS)
    assert "Shown: the buckets that DDP built, " in shown.out
    assert "  no_sync but for the last        4         1 " in shown.out


def test_without_its_options_it_trains(run_cli: Callable[..., Any], data_dir: Path) -> None:
    words = ["--dataset", "digits", "--data-dir", data_dir, "--limit", 128, "--epochs", 1]
    document = json.loads(run_cli("ddp", *words, "--json").out)
    assert [step["name"] for step in document["steps"]] == ["run"]
    assert document["replicas_max_difference"] == 0.0


def test_the_command_line_offers_what_the_tables_have(run_cli: Callable[..., Any], digits_folder: Path) -> None:
    words = " ".join(run_cli("ddp", "--help").out.split())
    assert f"{', '.join(HOOKS)} or all." in words
    assert all(f"{hook.name}: {hook.summary}" in words for hook in HOOKS.values())
    assert f"--model [{'|'.join(MODELS)}]" in words
    assert f"--only [{'|'.join(PARTS)}]" in words
    assert all(lab_settings(digits_folder, model=model).bucket_caps for model in MODELS)
    assert all(part.code.summary for part in PARTS.values())
    assert all(part.name == part.code.name for part in PARTS.values())


def test_without_torch(torch_is_imported: Callable[..., list[str]]) -> None:
    """What the launcher imports to parse options, to unpickle results and to show them."""
    modules = ("page", "settings")
    assert not torch_is_imported(*(f"playground.lessons.ddp.{module}" for module in modules))


def lab_settings(folder: Path, **changes: Any) -> LabSettings:
    return LabSettings(training=TrainingSettings(folder=folder, limit=32, batch_size=8, seed=1), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": ("bucket",)}, "part 'bucket' is unknown: choose one of buckets, hooks, "),
        ({"model": "lenet"}, "model 'lenet' is unknown: choose one of net, resnet18"),
        ({"hooks": ("none", "fp8")}, "hook 'fp8' is unknown: choose one of none, fp16, bf16, powersgd"),
        ({"hooks": ("fp16",)}, "hooks fp16: none must come first"),
        ({"hooks": ("none",), "required": ("fp16",)}, "required hook 'fp16' is unknown: choose one of none"),
        ({"caps": (1.0, float("nan"))}, "bucket cap nan: it must be a finite number of MiB above 0"),
        ({"caps": (0.0,)}, "bucket cap 0.0: "),
        ({"steps": 0}, "steps 0: it must be at least 1"),
    ],
)
def test_settings_validate_themselves(changes: dict[str, Any], message: str, digits_folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        lab_settings(digits_folder, **changes)
    assert str(caught.value).startswith(message)


def own_steps(rank: int, size: int, settings: LabSettings) -> None:
    """Every rank was asked for another number of steps."""
    run_lab(rank, size, replace(settings, steps=settings.steps + rank))


def test_ranks_that_were_asked_for_different_things_are_stopped(world: Worlds, digits_folder: Path) -> None:
    with pytest.raises(UsageError, match="steps is 5 on rank 0 and 6 on rank 1"):
        world(2).run(own_steps, lab_settings(digits_folder, parts=("sampler",)))


def test_what_must_be_the_same_on_all_ranks(digits_folder: Path, tmp_path: Path) -> None:
    """Everything but the folder; and caps that are the model's are the same, asked for or not."""
    settings = lab_settings(digits_folder)
    own_folder = lab_settings(tmp_path, caps=settings.bucket_caps)
    assert settings.on_all_ranks() == own_folder.on_all_ranks()
    assert settings.on_all_ranks() != lab_settings(digits_folder, parts=("hooks",)).on_all_ranks()
    assert settings.on_all_ranks() != replace(settings, training=replace(settings.training, lr=1)).on_all_ranks()


def test_data_that_disappears_is_a_failure_with_a_name(world: Worlds, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="FileNotFoundError"):
        world(2).run(RUN_LAB, lab_settings(tmp_path, parts=("hooks",)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bucket-cap-mb", "0"], "0.0 is not in the range"),
        (["--bucket-cap-mb", "1,-5"], "-5.0 is not in the range"),
        (["--bucket-cap-mb", "1,"], "'' is not a valid float"),
        (["--bucket-cap-mb", "nan"], "nan is not a finite number"),
        (["--comm-hook", "fp8"], "'fp8' is none of none, fp16, bf16, powersgd, all"),
        (["--only", "everything"], "'everything' is not one of"),
        (["--steps", "0"], "0 is not in the range"),
        (["--model", "lenet"], "'lenet' is not one of"),
        (
            ["--model", "resnet18", "--batch-size", "3"],
            "resnet18's BatchNorm needs two samples or more on each, so at least 4",
        ),
        (["--lab", "--batch-size", "1"], "at least one each"),
        (["--lab", "--epochs", "2"], "--epochs is for training"),
        (["--lab", "--loader", "per-sample"], "--loader is for training"),
        (["--lab", "--loader-workers", "2"], "--loader-workers is for training"),
        (["--only", "sampler", "--static-graph"], "--static-graph changes nothing in sampler"),
        (["--only", "hooks", "--accumulate", "2"], "--accumulate changes nothing in hooks"),
        (["--only", "buckets", "--lr", "1"], "--lr changes nothing in buckets: it is for hooks"),
        (["--only", "sampler", "--batch-size", "16"], "--batch-size changes nothing in sampler"),
        (["--lab", "--batch-size", "601"], "there are 600 samples to train on"),
        (["--only", "accumulation", "--accumulate", "257"], "the lab adds up 256 at most"),
        (["--lab", "--limit", "601"], "601: digits has 600 samples"),
    ],
)
def test_bad_input(words: list[str], message: str, run_cli: Callable[..., Any], data_dir: Path) -> None:
    shown = run_cli("ddp", *words, "--dataset", "digits", "--data-dir", data_dir)
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err
    assert shown.err.count("\n") == 1
