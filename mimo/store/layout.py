"""Under which names things lie on a Redis server.

    {ek1:<hex>}:c:<writer>:<i>   chunks of 262,128 bytes, written first
    {ek1:<hex>}:m                manifest, committed last by SET NX
    {ek1:<hex>}:l                lease: the id of who encodes; released on channel ek1:<hex>
    {alias:<hex>}                media plan of a file

The braces put an entry into one Cluster slot. An ACL needs no more than ``~{ek1:*``, ``~{alias:*``
and ``&ek1:*``.
"""

from collections.abc import Sequence

from mimo.store.keys import EmbeddingKey
from mimo.store.manifest import Manifest

ALL_OF_ENTRIES = "{ek1:*"
MANIFESTS = "{ek1:*}:m"
CHUNKS = "{ek1:*}:c:*"
LEASES = "{ek1:*}:l"
PLANS = "{alias:*}"


def manifest_name(key: EmbeddingKey) -> str:
    return f"{{ek1:{key}}}:m"


def key_of_manifest(name: str) -> EmbeddingKey:
    """The key in the name of a manifest."""
    return EmbeddingKey(name.removeprefix("{ek1:").removesuffix("}:m"))


def chunk_names(manifest: Manifest) -> Sequence[str]:
    prefix = f"{{ek1:{manifest.key}}}:c:{manifest.writer}"
    return [f"{prefix}:{index}" for index in range(manifest.num_chunks)]


def lease_name(key: EmbeddingKey) -> str:
    return f"{{ek1:{key}}}:l"


def channel(key: EmbeddingKey) -> str:
    return f"ek1:{key}"


def alias_name(alias: str) -> str:
    return f"{{alias:{alias}}}"
