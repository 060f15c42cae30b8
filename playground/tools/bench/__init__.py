"""Measure collectives, ours beside the backend's. Begin with `settings`, then `benchmark`.

settings   what is measured: one object from the command line to the ranks
benchmark  in a rank: each call is checked, and timed
results    rows of times, their averages, and the comparison of two results
plot       the results as a figure
page       the commands `bench` and `bench compare`
steps      the command `bench steps`, which times training steps
"""
