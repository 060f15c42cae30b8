"""The command `run`: a script for torchrun, or a module, on ranks of this machine, unchanged; and
the command of each lesson, which runs its program. Begin with `page`, then `start`.

    page     the command `run`
    command  the command of a lesson, whose constants are options
    options  what every program can be asked
    start    from either command to the ranks
    dry      `run --dry`: what would be run
"""
