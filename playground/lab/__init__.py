"""Ways of training side by side: the same weights, the same batches, and what each did noted or timed."""
