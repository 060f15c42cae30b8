"""What is drawn of runs: the figures of the field's tutorials, and those of the chapters.

command        `see`
catalogue      all figures by name, and their runs
figure         what a figure is, and the run it is drawn from
runs           recorded runs, which travel with the project (`recordings/`)

collectives    messages and collectives
parallel       remote calls, sharded layers, causal attention, a mesh
training       parts of a step, buckets, steps on ranks that are killed
data_parallel  DataParallel: one process, several devices
counted_step   ZeRO's stages, counted

ranks          what ranks run for figures
counting       what a rank holds and sends
"""

from __future__ import annotations

from playground.base.remote import remote
from playground.tools import Tool

SEE = Tool(
    name="see",
    purpose="look at a recorded run, and draw the figures of tutorials from runs of your own",
    command=remote("playground.figures.command:command"),
)
