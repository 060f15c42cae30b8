"""What a recorded run looks like: scenes, laid out once, and what paints them."""
