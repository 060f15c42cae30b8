"""Predict all-reduce on any number of ranks, from the latency of a message and the bandwidth of a
link."""
