"""The pages of the programs of `break`. Does not import torch."""

from __future__ import annotations

import difflib
import html
import re
import textwrap

from playground.base.remote import file_of
from playground.figures.runs import find_run
from playground.site.code import show_code
from playground.site.pages import Site
from playground.site.search import Section
from playground.tools.failures.programs import PROGRAMS, find, read_body


def add_program(site: Site, name: str) -> None:
    """A program of `break`, where its ranks stand, what is said about it, and its cure."""
    page, function, recording = f"break-{name}", find(name), find_run(f"break {name}")
    file, lines = file_of(function.module), read_body(function)
    wrong, cured = ([*read_body(each).values()] for each in (function, find(name, "_cured")))
    changes = [*difflib.unified_diff(wrong, cured, lineterm="", n=len(wrong))][3:]
    why = re.search(rf"^\| `{name}` \| .* \| (.*) \|$", site.texts["break"], re.MULTILINE)
    symptom = f"{PROGRAMS[name].symptom} ({PROGRAMS[name].words})".removesuffix(" ()")
    command = f"python -m playground break {name}"
    site.sections.append(Section(f"{page}.html", f"break: {name}", function.summary))
    body = f"""<h1>{name}</h1>
<p>{html.escape(function.summary)} Symptom: {symptom}.</p>
{show_code(textwrap.dedent(chr(10).join(wrong)), "python", file, min(lines))}
<p>Why, and what to do: {site.markdown.renderInline(why[1] if why else "")}. The program is in <a
href="{site.link(file)}#{file.name}-{min(lines)}">{file.name}</a>, and <code>{command}</code>
runs it, and then the fixed program. All programs: <a href="break.html">break</a></p>
<figure>{site.play(recording, page, {file: lines}) if recording else ""}</figure>
<h2 id="fix">The fix</h2>
{show_code("".join(f"{line[0]}{line[5:]}{chr(10)}" for line in changes), "diff")}"""
    site.add(page, f"break: {name}", body, within="break")
