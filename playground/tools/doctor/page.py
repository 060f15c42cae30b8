"""The command `doctor`: the checks of this machine, torch, several hosts, or a script. Does not import torch."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from playground.console.options import ALL, RunOptions, flags, names_option, pack_options, select_names
from playground.console.session import Session
from playground.console.text import Prose, bad, good, prose
from playground.runtime.errors import PlaygroundError, UsageError
from playground.runtime.flags import flag
from playground.runtime.meeting.rendezvous import is_loopback
from playground.tools import TOOLS
from playground.tools.doctor import ERROR, Check, Finding, hosts, machine, portability, run_checks, script, software

TOOL = TOOLS["doctor"]
TIERS: Mapping[str, Mapping[str, Check]] = {
    "machine": machine.CHECKS,
    "torch": software.CHECKS,
    "hosts": hosts.CHECKS,
    "script": portability.CHECKS,
}
CHECKS = [check for checks in TIERS.values() for check in checks]


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    names: str | None = flag(
        None, "Hosts to examine, in the same order on each of them, where this command is to be started, too.",
        name="--hosts", metavar="HOST,…",
    )  # fmt: skip
    port: int = flag(29600, "Port at which they ask each other.", least=1, most=65535)
    seconds: float = flag(10.0, "Seconds for which a script runs on each number of ranks, at most.", above=0, below=1e6)

    @property
    def hosts(self) -> list[str]:
        """Raises `UsageError` for a host that is named twice, and for one alone."""
        found = [each.strip() for each in (self.names or "").split(",") if each.strip()]
        if twice := next((each for each in found if found.count(each) > 1), ""):
            raise UsageError(f"--hosts names {twice} twice: give each host once")
        if len(found) == 1:
            raise UsageError(f"--hosts names {found[0]} alone: give two hosts or more, or leave it out")
        return found


def count(findings: Sequence[Finding], number: int) -> str:
    """How many checks there were, and how many findings of each severity."""
    errors = sum(each.severity == ERROR for each in findings)
    found = {"error": errors, "warning": len(findings) - errors}
    amounts = [f"{amount} {what}{'s' * (amount > 1)}" for what, amount in found.items() if amount]
    return f"{number} check{'s' * (number > 1)}, {', '.join(amounts) or 'nothing found'}"


def finding_text(finding: Finding) -> Prose:
    severity = bad(finding.severity) if finding.severity == ERROR else finding.severity
    where = f" on {finding.host}" * bool(finding.host)
    lines = f", {finding.check}{where}: {finding.saw}\n    rule: {finding.rule}\n    fix: {finding.fix}"
    return prose("  ", severity, lines)


class Examination:
    """The checks of one command, tier by tier; says what each has found."""

    def __init__(self, session: Session, settings: DoctorSettings, chosen: Sequence[str]) -> None:
        self.session, self.settings, self.chosen = session, settings, chosen
        self.findings: list[Finding] = []
        self.facts: dict[str, object] = {}

    def wants(self, tier: str) -> bool:
        return any(name in TIERS[tier] for name in self.chosen)

    def conclude(self, tier: str, facts: object, findings: Iterable[Finding], about: str = "") -> None:
        """Keep what a tier has found, and say it."""
        self.facts[tier], found = facts, [*findings]
        self.findings += found
        number = sum(name in TIERS[tier] for name in self.chosen)
        self.session.say(f"{tier}: {count(found, number)}{about}", *map(finding_text, found))

    def examine_machine(self) -> None:
        several = not all(map(is_loopback, self.settings.hosts)) or machine.spans_hosts()
        facts = machine.Machine(several_hosts=several)
        self.conclude("machine", facts, run_checks(machine.CHECKS, self.chosen, facts))

    def examine_torch(self) -> None:
        with self.session.bar as bar:
            bar.show("torch, in a process of its own")
            facts = software.examine(self.session.run.timeout)
        about = "" if facts.problem else f" (torch {facts.version}, imported in {facts.import_seconds:.1f} s)"
        self.conclude("torch", facts, run_checks(software.CHECKS, self.chosen, facts), about)

    def examine_script(self, path: Path, words: Sequence[str]) -> None:
        with self.session.bar as bar:
            bar.show(f"running {path.name}")
            facts = script.examine(path, words, self.settings.seconds, self.session.run.timeout)
        about = ", ".join(f"{run.size} ranks {run.outcome}" for run in facts.runs)
        about += f", in copies of its folder in {facts.folder}, removed by now"
        self.conclude("script", facts, run_checks(portability.CHECKS, self.chosen, facts), f" ({about})")

    def examine_hosts(self, size: int) -> int:
        """Returns the number of errors that another host has found, if that leads."""
        env, timeout = self.session.world.rank_env, self.session.run.timeout
        versions = {package: software.version_of(package) for package in ("torch", "playground")}
        versions["python"] = platform.python_version()
        about = hosts.About(name=platform.node(), versions=versions, findings=self.findings)
        listener, addresses = hosts.listen(self.settings.hosts, size, self.settings.port, env, about)
        names = self.settings.hosts or [f"host {number}" for number in range(size)]
        with self.session.bar as bar:
            bar.show("waiting for the other hosts")
            silent = hosts.meet(listener, addresses, timeout)
            bar.show("measuring the links")
            if silent is None:
                self.session.say(f"hosts: {names[listener.leader]} leads, and reports")
                return hosts.follow(listener, addresses, timeout)
            found = hosts.lead(listener, addresses, names, silent)
        if not self.settings.hosts:  # torchrun's are known by their own names
            known = [found.about[index].name if index in found.about else name for index, name in enumerate(names)]
            found = replace(found, names=known)
        theirs = [
            replace(finding, host=found.names[index])
            for index, said in found.about.items()
            for finding in said.findings
            if index != listener.index
        ]
        new = [*run_checks(hosts.CHECKS, self.chosen, found), *theirs]
        self.conclude("hosts", found, new, f" ({hosts.summarize(found)})")
        hosts.dismiss(listener, addresses, found, sum(each.severity == ERROR for each in self.findings))
        return 0


@click.command(TOOL.name, short_help=TOOL.purpose, context_settings={"allow_interspersed_args": False})
@click.argument("words", metavar="[SCRIPT.py [ARGS]…]", nargs=-1, type=click.UNPROCESSED)
@pack_options("settings", DoctorSettings)
@names_option("--check", known=[*TIERS, *CHECKS], default=(ALL,), help="Checks to run, by name or tier")
@flags(RunOptions, "timeout", "as_json", changes={"timeout": {"help": "Seconds to wait for torch, and for hosts."}})
def command(
    words: tuple[str, ...], settings: DoctorSettings, check: tuple[str, ...], timeout: float, as_json: bool
) -> None:
    """Examine this machine, torch, and, with --hosts or under torchrun, the hosts and their links. Or a script for
    torchrun: what would break on nccl, on more ranks, or with unequal data. It runs on 2 ranks, then on 3, unseen,
    in a copy of the working folder.

    Of each finding: what was seen, the rule, and the fix. Exit code 1 if one is an error.

    \b
        python -m playground doctor
        python -m playground doctor --check torch,shared-memory
        python -m playground doctor --hosts a,b,c
        python -m playground doctor train.py --epochs 1
    """
    session = Session(TOOL.name, RunOptions(timeout=timeout, as_json=as_json), default_size=1)
    env = session.world.rank_env
    size = len(settings.hosts) or (env.size // env.local_size if env else 1)
    tiers = ["script"] if words else [tier for tier in TIERS if tier != "script" and (tier != "hosts" or size > 1)]
    if words and (env or settings.hosts):
        raise UsageError(f"doctor {words[0]} starts ranks of its own, here: run it without torchrun and --hosts")
    if env and env.local_rank:
        return  # one process examines a host
    known = [name for tier in tiers for name in TIERS[tier]]
    wanted = {*check} | {name for tier in tiers if tier in check for name in TIERS[tier]}
    examination = Examination(session, settings, select_names(known, [*wanted] or [ALL]))
    if missing := sorted(wanted - {*known, *tiers, ALL}):
        about = next(tier for tier in TIERS if missing[0] in (tier, *TIERS[tier]))
        cure = {"hosts": "several hosts: add --hosts, or start it by torchrun", "script": "a script: name one"}
        raise UsageError(f"--check {missing[0]} is about {cure.get(about, 'this machine: leave out the script')}")
    session.say(f"{TOOL.name}: {platform.node()}, {platform.platform()}, Python {platform.python_version()}", "")
    if examination.wants("machine"):
        examination.examine_machine()
    if examination.wants("torch"):
        examination.examine_torch()
    if words:
        examination.examine_script(Path(words[0]), words[1:])
    elsewhere = examination.examine_hosts(size) if examination.wants("hosts") else 0
    session.print_document({}, findings=examination.findings, **examination.facts)
    if errors := [each.check for each in examination.findings if each.severity == ERROR]:
        raise PlaygroundError(f"not fit for distributed training: {', '.join(dict.fromkeys(errors))}")
    if elsewhere:
        raise PlaygroundError("not fit for distributed training: the host that leads tells why")
    session.say("", prose("Shown: ", good("fit for distributed training"), "."))
