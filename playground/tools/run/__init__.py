"""The command `run`: a script for torchrun, or a module, on ranks of this machine, unchanged."""
