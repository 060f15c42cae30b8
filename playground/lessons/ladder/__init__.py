"""From average_gradients to DistributedDataParallel, rung by rung."""
