"""The sizes of the tiny GPT of tensor's board, for pages, which do not import torch."""

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 2, 96, 12, 48, 48
