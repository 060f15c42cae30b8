"""Training over a slow link: fewer messages, and fewer bytes in each."""
