"""The side of a world inside its ranks: what they run, and what they are members of."""
