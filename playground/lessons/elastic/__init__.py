"""Training that resumes after failures, and ends with the same bits.

lesson  ranks are killed, and start again from a snapshot
hosts   beside it: hosts leave and join
"""
