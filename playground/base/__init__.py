"""What every room needs: errors, files, signals, untrusted text, and torch's private functions."""
