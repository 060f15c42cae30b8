"""Attention over a sequence that is sharded over the ranks."""
