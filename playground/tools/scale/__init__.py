"""Predict all-reduce on any number of ranks, from the latency of a message and the bandwidth of a
link.

    settings  ranks to measure with, or a cluster
    plan      what is measured, its samples, and predictions
    samples   in a rank: the measurement
    fit       the model fitted to samples
    page      the command `scale`
"""
