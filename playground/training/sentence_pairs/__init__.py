"""Sentence pairs to train BERT on: where they come from, their tokens, and the batches of them."""
