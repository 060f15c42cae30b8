"""Answers to questions about any program: a lesson, or a script for torchrun."""

CHECKS = OFF, CERTAIN, HINTS, STRICT = "off", "certain", "hints", "strict"
"""What `--check` tells: nothing; what is certain or probable; hints, too; or what is certain or
probable, with exit code 1 if something is certain."""
