"""Who waits for whom in a run that goes on."""
