"""The sizes of the tiny GPT of tensor's board, for pages, which do not import torch."""

LAYERS = 2
WIDTH = 96
HEADS = 12
LENGTH = 48
VOCABULARY = 48
