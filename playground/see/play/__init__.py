"""A page that plays a recorded run: one HTML file that needs neither a network nor anything beside it."""
