"""Training that resumes after failures, and ends with the same bits."""
