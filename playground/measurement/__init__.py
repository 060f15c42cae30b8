"""Measurements: timing in turns, and the environment. Does not import torch."""
