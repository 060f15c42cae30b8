"""What every room needs: errors, files, signals, untrusted text, and torch's private functions.

This process, and those that it starts:

    signals             signals that end a program
    forks               resources that children must not have
    process_attributes  what a process has from its parent
    process_checks      what may be missing around a process
    process_status      its state, as the kernel says
    threads             threads of ours in a program
    connections         its TCP connections
    strangers           keeps them from other users
    socket_filter       has the kernel drop what arrives
    host                the host's cores, shared among ranks
    lost_ranks          what is done when a rank is lost

Input and output:

    errors     errors a user can meet
    flags      settings, declared once
    files      files in folders that others may write to
    event_log  a log that outlives its process
    untrusted  text, JSON and pickles of others
    ranks      ranks in words

Python and torch:

    upstream   what we use of them that is private
    imports    a program's import of torch
    remote     functions named without importing them
    frames     whose frame a frame is
    constants  a program's constants
"""
