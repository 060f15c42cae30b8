"""Remote calls, remote references, and backward passes that span ranks."""
