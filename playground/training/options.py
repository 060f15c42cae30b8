"""Commands that train: the options of their data, and what they say of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from playground.base.errors import UsageError
from playground.base.flags import flag
from playground.training import prepare
from playground.training.prepare import PreparedData, Settings
from playground.ui.options import pack_options
from playground.ui.session import Session
from playground.ui.tables import Text
from playground.ui.terminal import Bar


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    dataset: str = flag(
        "auto",
        "auto: MNIST if it is here or can be downloaded, else generated digits.",
        choices=prepare.DATASETS,
    )
    data_dir: Path | None = flag(
        None,
        "Directory of the data; what is missing is put there.",
        shown_default=f"${prepare.DATA_DIR}, else ~/.cache/playground",
    )
    limit: int | None = flag(None, "Train on the first N samples only.", least=1, metavar="N")

    @property
    def folder(self) -> Path:
        """Where the data is or will be put. Raises `NoData` if that is not given and the user has
        no home."""
        return self.data_dir or prepare.default_data_dir()


def data_options(*names: str) -> Callable[[Any], Any]:
    """Gives a command the argument `data`: its `DataOptions`, made of these options, or of all."""
    return pack_options("data", DataOptions, *names)


def prepare_data(asked: DataOptions, bar: Bar) -> PreparedData:
    """Get the data onto this host; `bar` shows what takes long. Raises `NoData`, and `UsageError`
    for a limit beyond the data."""
    data = prepare.prepare(
        asked.dataset, asked.folder, os.environ.get(prepare.MIRROR), bar.announce
    )
    if asked.limit and asked.limit > data.train:
        raise UsageError(f"--limit {asked.limit}: {data.name} has {data.train} samples to train on")
    return replace(data, limit=asked.limit, train=asked.limit or data.train)


def announce_data(
    session: Session,
    data: DataOptions,
    asked: Settings,
    *about: Text,
    ready: PreparedData | None = None,
) -> tuple[PreparedData, Settings]:
    """Prepare the data, unless it is `ready`, and say the head of the run: its world, the data, and
    `about`. Returns the data, and the settings `asked` for on it. Raises `UsageError` for less data
    than one batch."""
    prepared = ready or prepare_data(data, session.bar)
    asked.check_samples(prepared.train)
    session.say(f"{session.name}: {session.world}", f"data: {prepared}", *about)
    return prepared, prepared.settings(asked)


def over_links(session: Session, link: float) -> str:
    """The words on simulated links of `link` Gbit/s; none for 0. Raises `UsageError` where a link
    cannot be simulated."""
    if link and session.world.device != "cpu":
        raise UsageError(f"--link {link:g}: the simulation delays CPUs, on gloo: leave it out")
    return f", over simulated links of {link:g} Gbit/s" if link else ""
