"""The command `run`: a script for torchrun, or a module, on ranks of this machine, unchanged; and
the command of each lesson, which runs its program."""
