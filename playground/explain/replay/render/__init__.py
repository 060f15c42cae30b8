"""A recording as a picture and as text."""
