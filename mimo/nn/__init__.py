"""Building blocks of the models, in plain torch: norms, rotary embeddings, attention backends."""
