"""Is this machine, are these hosts, is this script fit for distributed training?

Each tier gathers facts, and its checks find faults in them. Begin with `checks`, then `page`.

    checks         what a check is, how it is run, and the faults that it finds
    machine        the first tier: this machine, without torch
    software       the second: torch, in a process of its own
    hosts          the third: the connections between hosts
    script         a script for torchrun, which runs on 2 ranks and on 3
    script_run     one of these runs
    imported       the training that it imports from a file beside it
    set_order      sets that its text walks in their own order
    looked_at      what the runs of a script have shown to the checks
    data_parallel/ what a training in one process lacks for data parallelism, by its text
    page           the command `doctor`
"""
