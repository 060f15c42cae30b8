"""The side of a world that starts its ranks, watches them, and ends them."""
