"""Attention over a sequence that is cut over the ranks."""
