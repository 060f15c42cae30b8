"""Snapshots of a training run: copied beside the training, written atomically, and whole or not there at all."""
