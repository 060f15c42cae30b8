"""The latency and the bandwidth that a recording shows: what its transfers took, by the number of their bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SPREAD = 2
"""The largest transfers must have so many times the bytes of the smallest."""


@dataclass(frozen=True)
class Link:
    """A transfer of n bytes takes alpha + n * beta seconds."""

    alpha: float
    """The latency."""
    beta: float
    """Seconds per byte: the inverse of the bandwidth."""
    nbytes: int | None = None
    """Where all transfers were of about one size, what that was: then nobody can tell alpha from beta, and all is in
    alpha."""

    def seconds(self, nbytes: int) -> float:
        return self.alpha + nbytes * self.beta

    def change(self, latency: float, bandwidth: float, nbytes: int) -> float:
        """By how many seconds a transfer becomes shorter (or, negative, longer) with so many times the latency and the
        bandwidth.

        Where alpha is not to be told from beta, all is taken for whichever would make it shorter: so it is a bound.
        """
        if self.nbytes is not None:
            return self.alpha * max(1 - latency, 1 - 1 / bandwidth, key=abs)
        return self.alpha * (1 - latency) + nbytes * self.beta * (1 - 1 / bandwidth)


Transfer = tuple[int, float]
"""Bytes, and the seconds that they took."""


def fit_link(transfers: Sequence[Transfer]) -> Link:
    """alpha and beta, neither below 0, with the smallest relative errors over the sizes that were seen.

    Of each size the median counts: what else the machine does adds to some transfers and not to others.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for nbytes, seconds in transfers:
        by_size[nbytes].append(seconds)
    points = [(nbytes, max(median(its), 1e-9)) for nbytes, its in sorted(by_size.items())]
    if not points:
        return Link(0.0, 0.0, nbytes=0)
    if points[-1][0] < SPREAD * max(1, points[0][0]):
        return Link(median(seconds for _, seconds in transfers), 0.0, nbytes=points[-1][0])
    return best([weighted_line(points), alpha_only(points), beta_only(points)], points)


def best(links: Sequence[Link], points: Sequence[Transfer]) -> Link:
    """Of those without anything below 0, the one with the smallest sum of squared relative errors."""
    allowed = [link for link in links if link.alpha >= 0 and link.beta >= 0]
    return min(allowed, key=lambda link: sum((link.seconds(nbytes) / seconds - 1) ** 2 for nbytes, seconds in points))


def weighted_line(points: Sequence[Transfer]) -> Link:
    """The line with the smallest squared relative errors: every point weighs 1 / seconds squared."""
    weights = [seconds**-2 for _, seconds in points]
    whole = sum(weights)
    mean_x = sum(weight * nbytes for weight, (nbytes, _) in zip(weights, points, strict=True)) / whole
    mean_y = sum(weight * seconds for weight, (_, seconds) in zip(weights, points, strict=True)) / whole
    above = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    below = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    beta = above / below
    return Link(mean_y - beta * mean_x, beta)


def alpha_only(points: Sequence[Transfer]) -> Link:
    """The latency alone, as near to all as can be."""
    return Link(sum(1 / seconds for _, seconds in points) / sum(seconds**-2 for _, seconds in points), 0.0)


def beta_only(points: Sequence[Transfer]) -> Link:
    """The bandwidth alone, as near to all as can be."""
    return Link(0.0, sum(x / y for x, y in points) / sum((x / y) ** 2 for x, y in points))
