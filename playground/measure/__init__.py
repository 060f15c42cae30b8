"""How fast collectives are on this machine, and whether they are right: ours beside the backend's."""
