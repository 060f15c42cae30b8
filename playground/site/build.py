"""The command `site`, and all pages: the same tree gives the same bytes. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

import click

from playground.base.errors import UsageError
from playground.base.files import make_folder, write_file
from playground.base.remote import ROOT
from playground.explain.replay.play.player import read_script, read_style
from playground.site import SITE
from playground.site.addresses import HERE, TEXTS
from playground.site.calculators.pages import FILES
from playground.site.code import show_code
from playground.site.contents import surround
from playground.site.failing_programs import add_program
from playground.site.pages import Site
from playground.site.search import Section, place_symptoms
from playground.tools.failures.programs import PROGRAMS
from playground.ui.option_types import FILE
from playground.ui.session import Session, session_command

SEARCH = "search.js"
"""A file of every site."""
COPIED = ("settings.js", "site.js", "icon.svg")
"""Files of this folder that every page loads."""


def write_site(folder: Path, show: Callable[[str, int, int], object]) -> list[str]:
    """Write all pages into a folder, and `show` how far it is. Returns their names. Raises
    `PlaygroundError` for a link that leads nowhere and for a figure or code that is stale, and
    `OSError` if the folder cannot be written to."""
    site = Site(show)
    # last: it leads back to all others
    for file, page in sorted(TEXTS.items(), key=lambda each: each[1] == "glossary"):
        site.add_text(file, page)
    for program in PROGRAMS:
        add_program(site, program)
    add_code(site)
    pages = surround(site.pages, site.titles)
    texts = pages | {
        "player.js": read_script(),
        "site.css": read_style() + (HERE / "site.css").read_text("utf-8"),
        SEARCH: search_data(site.sections),
    }
    files = site.copies | FILES | {name: HERE / name for name in COPIED}
    make_folder(folder / "figures")
    for name, text in texts.items():
        write_file(folder / name, text.encode())
    for name, file in files.items():
        write_file(folder / name, file.read_bytes())
    return [*pages]


def add_code(site: Site) -> None:
    """Add a page for each file of code that other pages link to."""
    for file, address in sorted(site.codes.items()):
        title = file.relative_to(ROOT).as_posix()
        language = "diff" if file.suffix == ".diff" else "python"
        code = (file / "__init__.py" if file.is_dir() else file).read_text(encoding="utf-8")
        body = f"<h1>{title}</h1>\n{show_code(code, language, file)}"
        site.add(address.removesuffix(".html"), title, body)


def search_data(sections: Sequence[Section]) -> str:
    """The script that gives a search what it finds: sections, and the symptoms that lead to
    them."""
    constants = {
        "SECTIONS": [astuple(section) for section in sections],
        "SYMPTOMS": place_symptoms(sections),
    }
    return "".join(
        f"const {name} = {json.dumps(value, separators=(',', ':'), ensure_ascii=False)};\n"
        for name, value in constants.items()
    )


DIR = click.argument("folder", metavar="DIR", type=FILE)


@session_command(SITE.name, DIR, only=("as_json",), short_help=SITE.purpose)
def command(session: Session, folder: Path) -> None:
    """Write the course as static pages into DIR: open its index.html, or put the folder on any
    static host."""
    if not (ROOT / "README.md").is_file():
        raise UsageError(
            f"{SITE.name} needs the whole project, and not its installed package: run it in a clone"
        )
    if any(folder.glob("[!.]*")) and not (folder / SEARCH).exists():
        raise UsageError(
            f"{folder} holds other files, which pages could replace: name a new folder"
        )
    pages = write_site(folder, session.bar.show)
    session.bar.clear()
    session.say(f"{folder} has {len(pages)} pages. Open {folder / 'index.html'}")
    session.print_document({}, folder=folder, pages=pages)
