"""Training of mimo-tiny: synthetic data, encoders, decoder, drafts, export and measurement."""
