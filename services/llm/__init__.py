"""Language model service: token ids and media embeddings in, token ids out."""
