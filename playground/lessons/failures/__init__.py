"""Five programs that stand still or are silently wrong."""
