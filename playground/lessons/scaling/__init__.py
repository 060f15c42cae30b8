"""More ranks: what they gain, how large a batch may be, and what share of a core is used."""
