"""What lessons that train share: the data, its partition, models, ways to average gradients, one training loop."""
