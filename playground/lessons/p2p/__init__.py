"""Point to point: send, recv, isend, irecv."""
