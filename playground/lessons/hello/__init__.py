"""N processes become one world."""
