"""The settings that two runs must share for one to resume where the other ended. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping

Fingerprint = Mapping[str, object]
"""Plain JSON data: settings, data, model. Mappings may be nested; a difference in one is named by its dotted path."""
MISSING = "missing"
"""Placeholder for the value of a key that one of the two lacks."""


def describe(value: object) -> str:
    """A value as text that can be shown: what is not printable is escaped, as JSON does."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def to_plain(fingerprint: Fingerprint) -> dict[str, object]:
    """The fingerprint as it comes back from a file, so that two can be compared: tuples are lists there. Raises
    `TypeError` or `ValueError` for what is not JSON data (NaN is not)."""
    plain: dict[str, object] = json.loads(json.dumps(fingerprint, allow_nan=False))
    return plain


def find_difference(saved: Fingerprint, own: Fingerprint) -> str | None:
    """The first key, in the order of `own`, whose values differ, and both values."""
    return compare(to_plain(saved), to_plain(own), "")


def compare(saved: Fingerprint, own: Fingerprint, path: str) -> str | None:
    for key in [*own, *(key for key in saved if key not in own)]:
        full, before, now = f"{path}{key}", saved.get(key, MISSING), own.get(key, MISSING)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            if difference := compare(before, now, f"{full}."):
                return difference
        elif before != now or type(before) is not type(now):
            return f"{describe(full)} is {describe(before)} in the snapshot and {describe(now)} here"
    return None
