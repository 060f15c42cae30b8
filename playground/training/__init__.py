"""Shared by lessons that train: data, its partition, models, ways to average gradients, one
training loop."""
