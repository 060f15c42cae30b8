"""Data, pipeline, context and tensor parallelism at once, on one device mesh."""
