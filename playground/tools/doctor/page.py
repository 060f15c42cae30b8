"""The command `doctor`: the checks of this machine, torch, several hosts, or a script. Does not
import torch."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click

from playground.base.errors import PlaygroundError, UsageError
from playground.base.flags import flag, like
from playground.base.wrapping import wrap_sentence
from playground.tools import TOOLS
from playground.tools.doctor import hosts, machine, script, software
from playground.tools.doctor.checks import (
    ERROR,
    NOTE,
    WARNING,
    Check,
    Fault,
    Undecided,
    run_checks,
)
from playground.tools.doctor.data_parallel.edits import show_edits
from playground.tools.doctor.data_parallel.parts import Plan
from playground.tools.doctor.data_parallel.plan import overrule, plan_of_half, plan_of_text
from playground.tools.doctor.imported import find_imported_training
from playground.ui.misplaced import tell_misplaced
from playground.ui.options import pack_options
from playground.ui.run_options import RunOptions
from playground.ui.session import Session, session_command
from playground.ui.terminal import width
from playground.ui.text import Prose, bad, good, prose
from playground.ui.units import plural
from playground.world.rendezvous.rendezvous import is_loopback

TOOL = TOOLS["doctor"]
TIERS: Mapping[str, Sequence[Check]] = {
    "machine": machine.CHECKS,
    "torch": software.CHECKS,
    "hosts": hosts.CHECKS,
    "script": script.CHECKS,
}


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """The options of `doctor`."""

    names: str | None = flag(
        None, "Hosts to examine, in the same order on each of them, where this command is to be "
              "started, too.",
        name="--hosts", metavar="HOST,…",
    )  # fmt: skip
    port: int = flag(29600, "Port at which they greet each other.", least=1, most=65535)
    seconds: float = flag(
        10.0,
        "Seconds for which a script runs on each number of ranks, at most.",
        above=0,
        below=1e6,
    )
    check: str | None = flag(
        None, "Run the checks of one tier only.", choices=TIERS, metavar="TIER"
    )
    timeout: float = like(RunOptions, "timeout", help="Seconds to wait for torch, and for hosts.")
    write: str | None = flag(
        None, "Write the script with the lines of data parallelism that it lacks to a new file.",
        metavar="FILE",
    )  # fmt: skip

    @property
    def hosts(self) -> list[str]:
        """Raises `UsageError` for a host that is named twice, and for one alone."""
        found = [each.strip() for each in (self.names or "").split(",") if each.strip()]
        if twice := next((each for each in found if found.count(each) > 1), ""):
            raise UsageError(f"--hosts names {twice} twice: give each host once")
        if len(found) == 1:
            raise UsageError(
                f"--hosts names {found[0]} alone: give two hosts or more, or leave it out"
            )
        return found


def count(faults: Sequence[Fault], number: int) -> str:
    """How many checks there were, and how many faults of each severity."""
    found = Counter(each.severity for each in faults)
    amounts = [plural(found[each], each) for each in (ERROR, WARNING, NOTE) if found[each]]
    return f"{plural(number, 'check')}, {', '.join(amounts) or 'nothing found'}"


def fault_text(fault: Fault) -> Prose:
    severity = bad(fault.severity) if fault.severity == ERROR else fault.severity
    if fault.severity == NOTE:
        return prose(f"  {NOTE}, {fault.check}: {fault.saw}")
    lines = f", {fault.check}: {fault.saw}\n    rule: {fault.rule}\n    fix: {fault.fix}"
    return prose("  ", severity, lines)


def examine(
    session: Session, settings: DoctorSettings, tiers: Sequence[str], words: Sequence[str]
) -> tuple[list[Fault], dict[str, object]]:
    """Examine tier by tier, and say what is wrong in each: this machine, its torch, a script with
    its arguments (`words`), the other hosts. Returns all faults, and the facts of each tier."""
    faults, facts = list[Fault](), dict[str, object]()

    def conclude(tier: str, found: object, summary: str = "", looks: Iterable[str] = ()) -> None:
        new = [*run_checks(TIERS[tier], found)]
        facts[tier] = found
        faults.extend(new)
        session.say(
            f"{tier}: {count(new, len(TIERS[tier]))}" + (f" ({summary})" if summary else ""),
            *map(fault_text, new),
            *looks,
        )

    if "machine" in tiers:
        conclude(
            "machine", machine.MachineFacts(several_hosts=not all(map(is_loopback, settings.hosts)))
        )
    if "torch" in tiers:
        session.bar.show("torch, in a process of its own")
        torch = software.examine(settings.timeout)
        conclude("torch", torch, software.summarize(torch))
    if "script" in tiers:
        session.bar.show(f"running {words[0]}")
        ran = script.examine(Path(words[0]), words[1:], settings.seconds, settings.timeout)
        conclude("script", ran, script.summarize(ran), script.describe(ran))
        if read := plan_of_half(Path(words[0])):
            half = overrule(read, (each for run in ran.runs for each in run.mistakes))
            facts["plan"] = half
            session.say("")
            say_plan(session, half, f"Data parallelism, by the text of {words[0]}:")
        if settings.write:
            write_changed(session, Path(settings.write), facts.get("plan"))
    if "hosts" in tiers:
        with hosts.listen(settings.hosts, settings.port) as listener:
            session.bar.show("waiting for the other hosts")
            met = hosts.meet(listener, settings.hosts, settings.timeout)
        conclude("hosts", met, hosts.summarize(met))
    return faults, facts


def say_plan(session: Session, found: Plan, title: str) -> None:
    """Say what a script lacks, with the lines to change as they are to be copied, and what it
    has."""
    session.say(title)
    for number, part in enumerate(found.parts, 1):
        session.say("", prose(f"{number}. {part.name}, {part.status}: {part.saw}"))
        if not session.run.as_json:
            for line in show_edits(found.source, part.edits):
                click.echo(f"    {line}")
        session.say(*(prose(f"    note: {note}") for note in part.notes))


def examine_text(session: Session, path: Path, found: Plan, target: Path | None) -> NoReturn:
    """Say what a training lacks whose processes do not meet, and write it with the lines of the
    plan to `target`, if there is one. Raises `PlaygroundError`."""
    title = f"{path.name} trains in each process apart. By its text, it needs, in this order:"
    say_plan(session, found, title)
    if target:
        write_changed(session, target, found)
    session.print_document({}, faults=[], plan=found, after=found.after)
    raise PlaygroundError(tell_what_to_do(path, found, target if found.edits else None))


def write_changed(session: Session, target: Path, found: object) -> None:
    """Write the script with the lines of the plan to a new file, or say that there are none. Raises
    `FileExistsError`."""
    if not (isinstance(found, Plan) and found.edits):
        session.say("", prose(f"--write {target}: there is nothing to write, as no line changes."))
        return
    with target.open("x", encoding="utf-8") as file:
        file.write(found.after)
    session.say("", prose(f"{target} was written: the script with these lines."))


def tell_what_to_do(path: Path, found: Plan, written: Path | None) -> str:
    """What a script lacks, and what to do: the commands are on lines of their own."""
    own = [
        str(number)
        for number, part in enumerate(found.parts, 1)
        if part.name in found.lacks and not part.edits
    ]
    given = ["these lines"] if found.edits else []
    if own:
        given.append(f"{'parts' if len(own) > 1 else 'part'} {', '.join(own)}, yours to write,")
    file = written or path
    lines = [
        fill(f"{path} is not data parallel: {', '.join(found.lacks)}."),
        f"With {' and '.join(given)} try",
        f"  python -m playground run -n 2 {file}",
        f"  python -m playground doctor {file}",
    ]
    if found.edits and not written:
        lines.append(f"To write these lines: python -m playground doctor --write FILE {path}")
    return "\n".join(lines)


def fill(text: str) -> str:
    """A last line that is as wide as the terminal at most."""
    return wrap_sentence(text, width(), at_spaces=True)


@session_command(
    TOOL.name,
    click.argument("words", metavar="[SCRIPT.py [ARGS]…]", nargs=-1, type=click.UNPROCESSED),
    pack_options("settings", DoctorSettings),
    only=("as_json",),
    size=1,
    short_help=TOOL.purpose,
    context_settings={"allow_interspersed_args": False},
)
def command(session: Session, words: Sequence[str], settings: DoctorSettings) -> None:
    """Examine this machine, torch, and, with --hosts, the connections between hosts. Or a script
    for torchrun: what would break on nccl, on more ranks, or with unequal data. It runs on 2 ranks,
    then on 3, unseen, in a copy of the working folder. Of a training in one process it says what
    data parallelism needs, line by line: that is read, and not run.

    Of each fault: what was seen, the rule, and the fix. Exit code 1 if one is an error, or if the
    script is not data parallel; 3 if neither is so, and a run of it was stopped after --seconds.

    \b
        python -m playground doctor
        python -m playground doctor --check machine
        python -m playground doctor --hosts a,b,c
        python -m playground doctor train.py --epochs 1
    """
    tiers = choose_tiers(session, words, settings)
    system = f"{platform.platform()}, Python {platform.python_version()}"
    session.say(f"{TOOL.name}: {platform.node()}, {system}", "")
    if words and Path(words[0]).is_file():
        tell_misplaced(words[0], words[1:], Path(words[0]).read_text("utf-8", "replace"))
    if words and (found := plan_of_text(Path(words[0]))):
        examine_text(
            session, Path(words[0]), found, Path(settings.write) if settings.write else None
        )
    if words and (inner := find_imported_training(Path(words[0]))):
        raise UsageError(
            f"{inner}, which {words[0]} imports, has the training: python -m playground doctor "
            f"{inner}"
        )
    faults, facts = examine(session, settings, tiers, words)
    session.print_document({}, faults=faults, **facts)
    conclude(session, words, faults, facts)


def choose_tiers(session: Session, words: Sequence[str], settings: DoctorSettings) -> Sequence[str]:
    """The tiers that are asked for. Raises `UsageError` for what cannot be done."""
    if session.world.rank_env:
        raise UsageError(
            f"{TOOL.name} examines a host from one process: run it without torchrun, RANK and "
            "WORLD_SIZE"
        )
    if words and settings.hosts:
        raise UsageError(f"doctor {words[0]} starts ranks of its own, here: run it without --hosts")
    if settings.write and not words:
        raise UsageError(f"--write {settings.write}: name the script that is to be changed")
    if settings.write and os.path.lexists(settings.write):
        raise UsageError(f"--write {settings.write}: there is such a file: name a new one")
    tiers = ["script"] if words else ["machine", "torch", *(["hosts"] if settings.hosts else [])]
    if settings.check and settings.check not in tiers:
        raise UsageError(
            f"--check {settings.check}: this run has {', '.join(tiers)}; hosts need --hosts, a "
            "script its name"
        )
    return [settings.check] if settings.check else tiers


def conclude(
    session: Session, words: Sequence[str], faults: Sequence[Fault], facts: Mapping[str, object]
) -> None:
    """Say what was found. Raises `PlaygroundError` for an error, or a script that is not data
    parallel, `Undecided` for one that was stopped."""
    if checks := dict.fromkeys(each.check for each in faults if each.severity == ERROR):
        raise PlaygroundError(f"not fit for distributed training: {', '.join(checks)}")
    ran, told = facts.get("script"), tell_found(faults, facts)
    if isinstance(ran, script.ScriptFacts):
        raise_unless_decided(ran, words[0], told)
    none = good("None of the faults that these checks look for was found.")
    verdict = f"{told}no error." if told else none
    session.say("", prose(verdict, " What was not called was not looked at." if words else ""))


def raise_unless_decided(ran: script.ScriptFacts, name: str, told: str) -> None:
    """Raise `Undecided` for runs of a script that were stopped, `PlaygroundError` for those of one
    that is not data parallel. `told`: what is said before."""
    seconds = f"{3 * ran.seconds:g}"
    longer = f"give it longer: python -m playground doctor --seconds {seconds} {name}"
    if ran.awaited:
        why = f"within {ran.seconds:g} s the ranks had not come to init_process_group"
        raise Undecided(fill(f"{told}undecided: {why} ({ran.awaited}); {longer}"))
    if ran.trains_apart:
        why = "nothing averages gradients or parameters"
        raise PlaygroundError(fill(f"{told}{name} is not data parallel: {why}"))
    if ran.is_undecided:
        steps = plural(sum(run.looked_at.steps for run in ran.runs), "step")
        seen = f"stopped after {ran.seconds:g} s, {steps} of optimizers seen"
        raise Undecided(fill(f"{told}undecided: {seen}; {longer}"))


def tell_found(faults: Sequence[Fault], facts: Mapping[str, object]) -> str:
    """The number of warnings, and the parts of data parallelism that are missing: empty for
    none."""
    warnings = sum(each.severity == WARNING for each in faults)
    plan = facts.get("plan")
    return "".join([
        f"{plural(warnings, 'warning')}, " if warnings else "",
        f"missing: {', '.join(plan.lacks)}; " if isinstance(plan, Plan) and plan.lacks else "",
    ])  # fmt: skip
