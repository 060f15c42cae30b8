"""Programs of torch.distributed that go wrong, each beside its cure."""
