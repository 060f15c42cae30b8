"""A recorded run: recorded, analysed, rendered as text and as a picture, and as a page that plays
it."""
