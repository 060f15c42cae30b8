"""DistributedDataParallel, used and taken apart."""
