"""A parameter server: synchronous, asynchronous, and with bounded staleness."""
