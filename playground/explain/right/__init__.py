"""Is it right? Silent mistakes of a program's training: it raises nothing, and its result is not
the one that was meant.

Each rank writes what it sees of its optimizers, models and calls into a log of its own, which is
there after the rank was killed. The ranks' logs are compared when the program has ended. Ranks call
nothing for this. A finding names the ranks, the step, the line, why, and what to do. What the rules
need and nobody has seen is unknown, and an unknown is never a finding.
"""
