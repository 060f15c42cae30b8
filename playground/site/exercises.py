"""The exercises of a chapter, and the list of all. Does not import torch."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from playground.exercises.exercise import CATALOGUE, FOLDER, Exercise
from playground.site.code import show_code
from playground.site.contents import PROGRESS
from playground.site.search import Section

if TYPE_CHECKING:
    from playground.site.pages import Site

BEFORE_EXERCISES = re.compile(r'<h2 id="(try-this|exercises)">.*?(?=<h2|\Z)', re.DOTALL)
"""What stands before the exercises: what to try, or a page's own words on them."""


def add_exercises(site: Site, page: str, body: str) -> str:
    """The body of a chapter with its exercises, if it has some."""
    own = [each for each in CATALOGUE.values() if each.lesson == page]
    if not own:
        return body
    shown = "".join(show_exercise(site, each) for each in own)
    heading = '<h2 id="exercises">Exercises</h2>\n'
    return BEFORE_EXERCISES.sub(
        lambda part: part[0] + ("" if part[1] == "exercises" else heading) + shown, body
    )


def list_exercises(site: Site, body: str) -> str:
    """The page of all exercises, with links to them by lesson."""
    lists = body
    for lesson, its in groupby(CATALOGUE.values(), lambda each: each.lesson):
        links = "".join(
            f'<li><a href="{site.link(FOLDER / each.folder)}">{each.title}</a></li>' for each in its
        )
        lists += f'<h2 id="{lesson}">{lesson}</h2><ul>{links}</ul>'
    return lists


def show_exercise(site: Site, exercise: Exercise) -> str:
    """The task, the stub, the commands, the hints, each inside the one before, and the names of
    known mistakes."""
    page, file, hints = exercise.lesson, FOLDER / exercise.folder / "text.md", ""
    name = f"exercise-{exercise.name}"
    site.sections.append(Section(f"{page}.html#{name}", f"{page}: {exercise.title}"))
    task = site.render(page, file, exercise.task.partition("\n")[2])
    for number, hint in reversed([*enumerate(exercise.hints, 1)]):
        hints = (
            f"<details><summary>Hint {exercise.describe_hint(number)}</summary>"
            f"{site.render(page, file, hint)}{hints}</details>\n"
        )
    run = "".join(
        f"$ python -m playground {command} {exercise.name}\n" for command in ("exercise", "check")
    )
    mistakes = "".join(
        f"<li>{site.markdown.renderInline(mistake.name)}</li>" for mistake in exercise.mistakes
    )
    return f"""<section class="exercise" aria-labelledby="{name}">
<h3 id="{name}">{site.markdown.renderInline(exercise.title)}</h3>
{task}<p>{exercise.effort}</p>
<div class="copied">{show_code(exercise.stub, "python", name=exercise.file)}</div>
{show_code(run, "console")}{hints}<details><summary>Mistakes that others made</summary>
<ul>{mistakes}</ul></details>
{PROGRESS.format(name)}</section>
"""
