"""Synchronous SGD by hand."""
