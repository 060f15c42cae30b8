"""The settings of a run of `bert`, and the results of its parts: plain data. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from playground.lessons.bert.pretrained import SCRATCH
from playground.measurement import Fields
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import check_at_least_one, check_choice, check_flags, flag
from playground.training.bert_config import BertConfig
from playground.training.settings import BUCKET_CAP

ONE_PROCESS = ("data-parallel", "loss-in-forward")
DDP = "ddp"
WAYS = (*ONE_PROCESS, DDP)
"""The first two drive all devices from one process; in the last each rank has one."""
EXACT_STEPS = 20
"""How many losses are compared in float64."""
BUCKETS = 4
"""As many buckets of gradients, about, even the smallest model has where their overlap is measured."""
LOSSES_TO_COMPARE = 10
"""Number of steps over which the loss that is shown is a mean."""
REPORTS = 6
"""How often the loss is reported, about."""


@dataclass(frozen=True, kw_only=True)
class BertSettings:
    """Raises `UsageError` for what cannot be trained."""

    folder: Path
    """The tokenised pairs."""
    config: BertConfig
    weights: str = SCRATCH
    """The name or the folder of pretrained ones, or `SCRATCH`."""
    workers: int
    """Devices of one process, or ranks with a device each."""
    device_type: str = "cpu"
    device_count: int = 0
    """How many devices one process can drive here; 0 for any number."""
    threads: int = 1
    """Cores that a device of the CPU stands for."""
    way: str = DDP
    """One of `WAYS`."""
    batch_size: int = flag(64, "Global batch size: pairs per step, over all workers.", least=1)
    steps: int = flag(300, "Steps to train.", least=1)
    lr: float = flag(1e-3, "Learning rate of Adam.", least=0)
    max_length: int = flag(64, "Tokens that a pair is cut to.", least=5)
    double: bool = False
    """Whether to compute in float64."""
    seed: int = 1234

    def __post_init__(self) -> None:
        check_choice("way", self.way, WAYS)
        check_at_least_one(self, "workers", "threads")
        check_flags(self)
        asked = f"--batch-size {self.batch_size} for {self.workers} workers"
        if self.batch_size < self.workers:
            raise UsageError(f"{asked}: it is for all together, so at least one each")
        if self.batch_size % self.workers:
            why = "DistributedSampler gives all ranks equally many samples"
            raise UsageError(f"{asked}: {why}, so choose a multiple of {self.workers}")
        self.config.check_length(self.max_length)

    @property
    def report_every(self) -> int:
        """Steps between two reports of the loss."""
        return -(-self.steps // REPORTS)

    @property
    def bucket_cap(self) -> int:
        """Bytes of a bucket of gradients: DistributedDataParallel's default, or fewer, so that there are several."""
        return min(BUCKET_CAP, 4 * self.config.parameters // BUCKETS)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices of one process."""
        return tuple(f"{self.device_type}:{number}" for number in range(self.workers))

    @property
    def ranks(self) -> int:
        """Number of processes this way takes."""
        return self.workers if self.way == DDP else 1

    def on(self, way: str, workers: int | None = None) -> BertSettings:
        """The same training by another way, on as many workers or on others. Where one process can drive fewer, on as
        many of those as share a batch equally."""
        most = min(workers or self.workers, self.most_workers(way))
        return replace(self, way=way, workers=next(each for each in range(most, 0, -1) if self.batch_size % each == 0))

    def most_workers(self, way: str) -> int:
        """The largest number of workers: any number of virtual devices, as many ranks on GPUs as were asked for, and as
        many GPUs of one process as there are."""
        if not self.device_count:
            return self.batch_size
        return self.workers if way == DDP else min(self.workers, self.device_count)

    @property
    def exact(self) -> BertSettings:
        """Few steps of the same training, in float64 and without dropout: what then differs is rounding."""
        config = replace(self.config, dropout=0.0)
        return replace(self, double=True, config=config, steps=EXACT_STEPS)

    def check_samples(self, samples: int) -> None:
        """Raise `UsageError` if `samples` to train on are less than one whole batch."""
        if self.batch_size > samples:
            raise UsageError(f"--batch-size {self.batch_size}: there are {samples} pairs to train on, choose no more")

    def on_all_ranks(self) -> dict[str, object]:
        """Settings that must be the same on every rank: all but a host's own folders and devices."""
        own = ("folder", "threads", "device_count")
        return {name: value for name, value in asdict(self).items() if name not in own}


EXACT = 1e-12
"""How far losses in float64 may be apart: that much is rounding."""


def compare_losses(alone: Fields, others: Sequence[Fields]) -> list[Fields]:
    """How far each training is from `alone`: the largest difference of any loss, and the first and the last. Raises
    `PlaygroundError` if it is by more than rounding."""
    result = []
    for other in others:
        way, workers, losses = other["way"], other["workers"], other["losses"]
        difference = max(abs(one - two) for one, two in zip(alone["losses"], losses, strict=True))
        if not difference <= EXACT:
            far = f"its losses are up to {difference:.2g} from those of one device"
            raise PlaygroundError(f"{way} on {workers} workers: {far}, where rounding makes less than {EXACT:g}")
        ends = {"first": losses[0], "last": losses[-1], "difference": difference}
        result.append({"way": way, "workers": workers, "steps": len(losses), **ends})
    return result
