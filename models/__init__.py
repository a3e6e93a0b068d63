"""The bundled checkpoint: its sizes, tokenizer, random weights and files."""
