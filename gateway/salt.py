"""What separates one tenant's cache entries from another's."""

import hashlib


def tenant_salt(cache_salt: str) -> bytes:
    """Nothing for the default tenant, else a digest of the salt (32 bytes)."""
    return hashlib.sha256(cache_salt.encode()).digest() if cache_salt else b""
