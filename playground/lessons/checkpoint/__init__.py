"""Checkpoints in shards, which any number of ranks can read, and all that a run resumes from."""
