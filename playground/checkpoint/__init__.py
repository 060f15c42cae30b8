"""Snapshots of a training run: gathered at once, written beside the training, and whole or not
there at all."""
