"""A recording: its events, what records them in a rank, and its files."""
