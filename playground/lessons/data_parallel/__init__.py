"""DataParallel by its parts: one process, many devices."""
