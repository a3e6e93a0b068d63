"""Vision encoder service: frames of an image or clip in, embeddings for the language model out."""
