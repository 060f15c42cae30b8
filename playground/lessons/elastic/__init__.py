"""Training that goes on after failures, and ends with the same bits."""
