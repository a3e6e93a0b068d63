"""The decoder and its MTP blocks: arithmetic only, no cache, no device policy."""
