"""Settings check themselves by what their flags say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from playground.base.errors import UsageError
from playground.base.flags import check_flags, flag, flags_of, like

NAMES = ("one", "two")


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int = flag(10, "Steps.", least=1)
    lr: float = flag(0.1, "Learning rate.", least=0)
    workers: int | None = flag(None, "Workers.", least=0, most=64)
    timeout: float = flag(1.0, "Seconds.", above=0, below=1e6)
    dropout: float = flag(0.0, "Probability.", least=0, below=1)
    shift: float = flag(0.0, "Any number.")
    way: str = flag("one", "How.", choices=NAMES)
    ways: tuple[str, ...] = flag(NAMES, "How.", name="--way", choices=NAMES)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 0}, "steps 0: it must be at least 1"),
        ({"steps": 10**400}, "it must be at least 1"),
        ({"lr": -1.0}, "lr -1.0: it must be a finite number, 0 or above"),
        ({"lr": math.nan}, "lr nan: it must be a finite number, 0 or above"),
        ({"lr": math.inf}, "lr inf: it must be a finite number, 0 or above"),
        ({"workers": 65}, "workers 65: it must be between 0 and 64"),
        ({"timeout": 0.0}, "timeout 0.0: it must be above 0 and below 1000000.0"),
        ({"timeout": 1e6}, "timeout 1000000.0: it must be above 0 and below 1000000.0"),
        ({"timeout": math.nan}, "timeout nan: it must be above 0 and below 1000000.0"),
        ({"dropout": 1.0}, "dropout 1.0: it must be at least 0 and below 1"),
        ({"way": "three"}, "way 'three' is unknown: choose one of one, two"),
        ({"ways": ("one", "three")}, "way 'three' is unknown: choose one of one, two"),
    ],
)
def test_a_value_that_a_flag_does_not_allow_is_refused(
    given: dict[str, object], words: str
) -> None:
    settings = Settings(**given)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        check_flags(settings)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"steps": 1, "lr": 0.0, "workers": 64, "timeout": 5e-324, "dropout": 0.999},
        {"workers": 0, "shift": -math.inf, "ways": ()},
    ],
)
def test_bounds_are_values_unless_above_or_below(given: dict[str, object]) -> None:
    check_flags(Settings(**given))  # type: ignore[arg-type]


def test_a_flag_like_another_has_its_default_and_bounds() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other:
        steps: int = like(Settings, "steps", help="Fewer steps.")
        lr: float = like(Settings, "lr", 0.5)

    assert Other() == Other(steps=10, lr=0.5)
    assert flags_of(Other)["steps"].help == "Fewer steps."
    with pytest.raises(UsageError, match="steps 0: it must be at least 1"):
        check_flags(Other(steps=0))
