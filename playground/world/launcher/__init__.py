"""The side of a world that starts its ranks, watches them, and ends them.

launch           one function on N processes: start, watch, restart, end
pool             worlds that are kept for the next launch
fork_client      asks the fork server for ranks
forked_process   a process that comes of it, and the line to it
child_processes  starts a program, and kills children
fork_starter     starts the fork server
fork_server      a process that forks itself for each rank
store_process    the process that serves the store

rank_handle      the line to one rank
receiving        what ranks send: messages, output, questions, where they stand
watch            until results are in, a rank fails, or time is up
ending           they leave, are interrupted, or are stopped
examiner         looks at flight recorders, and proves deadlocks
standstill       tells of a run that stands still without proof

output           output of ranks, byte for byte
rounds           lines of several ranks in rounds
notices          what several ranks tell alike
"""
