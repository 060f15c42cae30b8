"""How ranks find each other: on one host, under torchrun, or started by hand; and how they notice a
loss."""
