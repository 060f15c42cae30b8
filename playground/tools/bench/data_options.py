"""`bench steps`: the option of its data, and what it says of them and of its links. Does not import
torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from playground.base.errors import UsageError
from playground.base.flags import flag
from playground.training import prepare
from playground.training.prepare import PreparedData, Settings
from playground.ui.session import Session
from playground.ui.tables import Text


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    dataset: str = flag(
        "auto",
        "auto: MNIST if it is here or can be downloaded, else generated digits.",
        choices=prepare.DATASETS,
    )


def announce_data(
    session: Session,
    dataset: str,
    asked: Settings,
    *about: Text,
    ready: PreparedData | None = None,
) -> tuple[PreparedData, Settings]:
    """Prepare the data `dataset`, unless it is `ready`, and say the head of the run: its world, the
    data, and `about`. Returns the data, and the settings `asked` for on it. Raises `NoData`, and
    `UsageError` for less data than one batch."""
    prepared = ready or prepare.prepare(
        dataset,
        prepare.default_data_dir(),
        os.environ.get(prepare.MIRROR),
        session.bar.announce,
    )
    asked.check_samples(prepared.train)
    session.say(f"{session.name}: {session.world}", f"data: {prepared}", *about)
    return prepared, prepared.settings(asked)


def over_links(session: Session, link: float) -> str:
    """The words on simulated links of `link` Gbit/s; none for 0. Raises `UsageError` where a link
    cannot be simulated."""
    if link and session.world.device != "cpu":
        raise UsageError(f"--link {link:g}: the simulation delays CPUs, on gloo: leave it out")
    return f", over simulated links of {link:g} Gbit/s" if link else ""
