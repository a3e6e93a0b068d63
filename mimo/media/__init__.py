"""Media arithmetic in NumPy, for processes without torch."""
