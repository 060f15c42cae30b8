"""Groups and collectives."""
