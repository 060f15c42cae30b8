"""A model in stages over ranks, and the order in which they work."""
