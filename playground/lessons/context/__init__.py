"""Attention over a sequence that is sharded over the ranks.

lesson   rings, in which keys and values travel
ulysses  beside it: in attention, a rank has all tokens and some of the heads
"""
