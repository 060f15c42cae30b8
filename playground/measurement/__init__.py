"""Time taken fairly, and the machine it was taken on: what lessons and tools that measure share."""
