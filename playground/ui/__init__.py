"""The parts that all commands share: options, tables, progress, JSON."""
