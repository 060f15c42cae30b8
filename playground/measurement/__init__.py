"""Measurements: the environment, and timing in turns, which imports torch."""
