"""Any training command under random kills from outside, and whether it ends with the same bits."""
