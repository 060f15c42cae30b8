"""Checkpoints in shards, which any number of ranks can load."""
