"""What a recording says: events by number and time, what belongs together, waits, logical time."""
