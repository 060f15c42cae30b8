"""The folder of a training run's snapshots, listed and verified, and what a snapshot costs on a disk."""
