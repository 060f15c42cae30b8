"""Every matrix cut over the ranks."""
