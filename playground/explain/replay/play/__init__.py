"""The page that plays a recording in a browser."""
