"""Look at a recorded run: as text, as a picture, as a page that plays it; and the figures of the field's tutorials."""
