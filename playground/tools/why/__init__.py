"""Why a run stands still: who waits for whom, from the black boxes of its ranks."""
