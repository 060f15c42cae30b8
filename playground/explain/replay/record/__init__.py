"""A recording: its events, what records them in a rank, and its files.

recording    events, ranks and runs
run          a run that is recorded
reading      reads what ranks have written
layout       the format on the disk

In a rank:

rank         records a function that it runs
recorder     writes events into a file
distributed  records torch.distributed
algorithms   records our own collectives
training     records training
"""
