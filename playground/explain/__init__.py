"""Answers to questions about any program: a lesson, or a script for torchrun.

hang    why does it stand still?
right   is its training right?
replay  what has it done? A recorded run
cost    what does it send, hold and compute?
memory  what holds its memory?

lines   the line of the program that has caused a call
starts  where ranks that are observed leave their logs
"""
