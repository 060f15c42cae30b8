"""How ranks find each other: on one host, under torchrun, or started by hand; and how they notice a
loss.

Begin with `environment`: what a rank is told of its world. `rendezvous` says where it meets the
others, and `store` waits there until all have come.

environment   what torchrun, Slurm or a person says of the world
rendezvous    the address of the store
keys          the keys of the store, who writes each and who reads it
store         the store at which ranks meet and part
store_server  the process that serves the store of ranks that we have launched
agreement     objects exchanged, and settings that must be the same

peers         who was lost first, in a world that others have started
peer_ends     the ends of other ranks' processes
"""
