"""Who waits for whom in a run that goes on, which is looked at from outside. Begin with `page`.

page        the command `why`: the flight recorders of a run's ranks
family      the processes of a run
unrecorded  ranks that keep no flight recorder, by what the system says of them
stacks      their stacks, as py-spy reads them
"""
