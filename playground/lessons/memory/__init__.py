"""Where the bytes of a training step are; mixed precision, and activations computed again."""
