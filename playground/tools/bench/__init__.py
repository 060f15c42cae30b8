"""Measure collectives, ours beside the backend's."""
