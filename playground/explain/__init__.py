"""Answers to questions about any program: a lesson, or a script for torchrun."""

CHECKS = OFF, CERTAIN, HINTS, STRICT = "off", "certain", "hints", "strict"
"""What `--check` tells: nothing, what is certain, hints, too, or what is certain, with exit code
1."""
