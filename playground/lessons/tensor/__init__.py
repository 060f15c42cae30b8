"""Every matrix sharded over the ranks."""
