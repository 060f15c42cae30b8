"""All figures, by name, and the runs that they are drawn from. Does not import torch."""

from __future__ import annotations

from playground.figures import collectives, data_parallel, parallel, training
from playground.figures.figure import Figure

_DRAWN = {
    each.name: each
    for module in (collectives, parallel, data_parallel, training)
    for each in vars(module).values()
    if isinstance(each, Figure)
}
TUTORIALS = sorted((name for name in _DRAWN if name[0] == "F"), key=lambda name: int(name[1:]))
"""Names of the tutorials' figures."""
FIGURES = {name: _DRAWN[name] for name in dict.fromkeys([*TUTORIALS, *_DRAWN])}
"""Those of the tutorials, and then those of the chapters."""
RUNS = {each.run.name: each.run for each in FIGURES.values()}
