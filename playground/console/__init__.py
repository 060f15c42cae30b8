"""What every command shares: options, tables, progress, plots, JSON."""
