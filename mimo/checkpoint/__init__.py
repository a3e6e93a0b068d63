"""Published checkpoints: which file holds which tensor, and how they become parameters."""
