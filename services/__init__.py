"""The deployable model services. Each is a leaf: none imports another."""
