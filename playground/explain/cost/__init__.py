"""What does it cost? The communication of a program, by its lines.

Each rank writes amounts into a log of its own, which is there after the rank was killed. An amount
belongs to a line of the program and to an operation that the line calls. What
DistributedDataParallel and FSDP send by themselves belongs to the line that caused it: the
constructor, the forward or `backward()`.

Begin with `meter`, which measures; `profile` adds up what the ranks have measured.

run      a run that is measured: `--profile`, `--link`
meter    in a rank: measures calls and waits
clock    the moments of the host and of a GPU
overlap  waits that overlap, counted once
log      the log of a rank
profile  the amounts of all ranks, by line
report   a profile as text and as JSON
page     a profile as a page
"""
