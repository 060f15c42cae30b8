"""What a recording says, computed from its events alone.

timeline      events by number, by time, by the event around them
matching      a send and its receive, the calls of one collective
waits         waits of ranks, and their causes
logical_time  every step takes one unit
holdings      values that a rank holds
"""
