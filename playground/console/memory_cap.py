"""The option --memory-cap: so much memory as people write it, 64MiB or 1.5G."""

from __future__ import annotations

import re
from typing import Any

import click

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
PATTERN = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([KMG]?)(?:i?B)?", re.ASCII | re.IGNORECASE)


class MemorySize(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no type arguments here
    """Bytes, as a whole number above 0. Units are binary, with or without the i: 64MB is 64MiB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = PATTERN.fullmatch(str(value).strip())
        size = round(float(match[1]) * UNITS[match[2].upper()]) if match else 0
        if not size:
            self.fail(f"{value!r} is no amount of memory: write bytes, or a number and KiB, MiB or GiB.", param, ctx)
        return size


memory_cap_option = click.option(
    "--memory-cap", type=MemorySize(), metavar="SIZE",
    help="Also find the largest batch with which no device holds more, as in 64MiB.",
)  # fmt: skip
