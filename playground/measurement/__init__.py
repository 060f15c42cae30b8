"""What every measurement needs.

interleave   calls timed in turns, in random order; imports torch
environment  the machine and the software, which a result is told with
"""
