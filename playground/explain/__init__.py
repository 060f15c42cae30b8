"""Answers to questions about any program: a lesson, or a script for torchrun."""
