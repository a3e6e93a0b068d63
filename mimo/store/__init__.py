"""The content-addressed embedding store that encoders write and decoders read.

Entries are named by what they are (``keys``), described by a manifest that is committed last
(``manifest``), and encoded once at a time across replicas (``lease``).
"""

from mimo.metrics import Metrics
from mimo.store.base import EmbeddingStore, Lookup, LookupStatus, Outcome
from mimo.store.keys import EmbeddingKey, Modality, parse_key
from mimo.store.manifest import Manifest

__all__ = [
    "EmbeddingKey",
    "EmbeddingStore",
    "Lookup",
    "LookupStatus",
    "Manifest",
    "Modality",
    "Outcome",
    "open_store",
    "parse_key",
]


def open_store(url: str, metrics: Metrics) -> EmbeddingStore:
    """The store at ``url``; connects on first use, so it never fails because a server is down.

    ``redis://``, ``rediss://``, ``unix://``, ``redis+cluster://`` and ``rediss+cluster://`` are
    servers; ``memory://`` lives in this process alone. Raises ConfigError for anything else.
    """
    if url.startswith("memory://"):
        from mimo.store.memory_store import MemoryStore

        return MemoryStore(metrics=metrics)
    from mimo.store.redis_store import RedisStore

    return RedisStore.from_url(url, metrics)
