"""What the lessons sgd and ddp share: the data, its partition, the model, averaging gradients, one training loop."""
