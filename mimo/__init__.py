"""The library every process shares: a torch-free half, and a torch half for the models."""
