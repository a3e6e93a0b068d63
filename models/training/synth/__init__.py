"""Synthetic media with known content: what the bundled model learns to see and hear."""
