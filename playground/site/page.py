"""The command `site`. Does not import torch."""

from __future__ import annotations

from pathlib import Path

import click

from playground.console.options import FILE
from playground.console.session import Session, session_command
from playground.runtime.errors import UsageError
from playground.runtime.remote import ROOT
from playground.site import SITE
from playground.site.build import write_site


@session_command(
    SITE.name, click.argument("folder", metavar="DIR", type=FILE), only=("as_json",), short_help=SITE.purpose
)
def command(session: Session, folder: Path) -> None:
    """Write the course as static pages into DIR: open its index.html, or put the folder on any static host.

    \b
        python -m playground site public
    """
    if not (ROOT / "README.md").is_file():
        raise UsageError(f"{SITE.name} needs the whole project, and not its installed package: run it in a clone")
    pages = write_site(folder, session.bar.show)
    session.bar.clear()
    session.say(f"Shown: {len(pages)} pages. Open {folder / 'index.html'}")
    session.print_document({}, folder=folder, pages=pages)
