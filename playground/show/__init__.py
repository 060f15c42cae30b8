"""What the user sees: results as text or JSON on stdout, progress on stderr."""
