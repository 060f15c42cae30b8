"""A benchmark as text while it runs, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from playground.runtime.entry import World
from playground.runtime.errors import Impossible

COLUMNS = (
    ("collective", "", "<15"), ("algorithm", "", "<18"), ("size", "(B)", ">12"), ("count", "(elements)", ">12"),
    ("type", "", ">9"), ("redop", "", ">6"), ("root", "", ">5"), ("time_us", "(us)", ">11.1f"),
    ("algbw", "(GB/s)", ">9.3f"), ("busbw", "(GB/s)", ">9.3f"), ("wrong", "", ">7"), ("p50_us", "(us)", ">11.1f"),
    ("p95_us", "(us)", ">11.1f"), ("p99_us", "(us)", ">11.1f"), ("limit_percent", "(%)", ">7.1f"),
)  # fmt: skip
"""Of the table and of the CSV: name, unit, format."""
TITLES = {"time_us": "time", "p50_us": "p50", "p95_us": "p95", "p99_us": "p99", "wrong": "#wrong"}
TITLES["limit_percent"] = "%limit"


class BenchResult:
    """Takes what rank 0 reports, says it at once, and keeps it: what is here when the run is broken off is the result.

    `content` is what the JSON document holds beside what every document does.
    """

    def __init__(self, say: Callable[[str], None], world: World, settings: dict[str, Any]) -> None:
        self.say, self.world = say, world
        self.content: dict[str, Any] = {
            "environment": None, "settings": settings, "rows": [], "average_busbw": {}, "limit": None,
            "complete": False,
        }  # fmt: skip
        self.columns = [column for column in COLUMNS if column[0] != "limit_percent" or settings["limit"]]

    def __call__(self, rank: int, event: dict[str, Any]) -> None:
        if rank != 0:
            return
        if "environment" in event:
            self.content["environment"] = event["environment"]
            if event["limit"]:
                self.content["limit"] = {"what": event["limit"], "rows": []}
            self.say("\n".join(self.head()))
        for row in event.get("rows", []):
            self.content["rows"].append(row)
            self.say("  " + "".join(f"{row[name]:{form}}" for name, _, form in self.columns))
        for row in event.get("wire", []):
            self.content["limit"]["rows"].append(row)

    def head(self) -> list[str]:
        """What was measured on, how, and the names of the columns."""
        settings, where = self.content["settings"], self.content["environment"]
        lines = [f"bench: {self.world}", environment_text(where)]
        lines.append(
            f"{settings['iterations']} trials of each size after {settings['warmup']} calls to warm up; "
            f"time: the median of the trials, each on its slowest rank"
        )
        if self.content["limit"]:
            lines.append(f"%limit: busbw, against {self.content['limit']['what']}")
        lines.append("".join(f"{TITLES.get(name, name):{width(form)}}" for name, _, form in self.columns))
        lines.append("".join(f"{unit:{width(form)}}" for _, unit, form in self.columns).rstrip())
        return [f"# {line}" for line in lines]

    def finish(self, complete: bool) -> None:
        """The averages of what there is."""
        self.content["complete"] = complete
        average = self.content["average_busbw"]
        for row in self.content["rows"]:
            average.setdefault(row["collective"], {}).setdefault(row["algorithm"], []).append(row["busbw"])
        for collective, algorithms in average.items():
            for algorithm, values in algorithms.items():
                algorithms[algorithm] = mean(values)
                self.say(f"# Avg bus bandwidth, {collective} by {algorithm}: {algorithms[algorithm]:.3f} GB/s")

    @property
    def wrong(self) -> int:
        return sum(row["wrong"] for row in self.content["rows"])


def width(form: str) -> str:
    """A number's format without its decimals: that of the title above it."""
    return form.partition(".")[0]


def environment_text(where: dict[str, Any]) -> str:
    hardware = [*where["gpus"], where["hardware"], f"{where['cores']} cores", f"{where['memory'] / 2**30:.0f} GiB"]
    software = [f"{name} {where[name]}" for name in ("python", "torch", "cuda", "nccl") if where[name]]
    return ", ".join([*hardware, where["os"], *software])


def write_csv(rows: list[dict[str, Any]], file: Path) -> None:
    """One row a row, under the names that JSON has for them."""
    try:
        with file.open("w", newline="", encoding="utf-8") as opened:
            writer = csv.DictWriter(opened, [name for name, _, _ in COLUMNS], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise Impossible(f"--csv {file} cannot be written: {error.strerror}") from None


def difference_text(rows: list[dict[str, Any]], before: dict[str, Any], after: dict[str, Any]) -> str:
    """Two results beside each other."""
    lines = []
    if before["environment"] != after["environment"]:
        names = ("before", before), ("after", after)
        lines += [f"# {name}: {environment_text(each['environment'])}" for name, each in names if each["environment"]]
    lines.append(f"# {'collective':15}{'algorithm':18}{'size':>12}{'before':>12}{'after':>12}{'ratio':>8}")
    lines.append(f"# {'':15}{'':18}{'(B)':>12}{'(us)':>12}{'(us)':>12}")
    lines += [
        f"  {row['collective']:15}{row['algorithm']:18}{row['size']:12}{row['before_us']:12.1f}{row['after_us']:12.1f}"
        f"{row['ratio']:8.2f}  {row['verdict']}"
        for row in rows
    ]
    return "\n".join(lines)
