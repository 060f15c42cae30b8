"""Data, pipeline, context and tensor parallelism at once, on one grid of ranks."""
