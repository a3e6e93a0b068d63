"""Files that clients send ahead of their requests, addressed by their content.

An upload is kept in this process and in the shared store, so that a request may reach another
gateway than its upload did. Both are caches: an upload that is gone is an error that says so.
"""

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gateway.items import Modality
from gateway.media.sniff import default_modality, sniff
from mimo.errors import InvalidRequest, Reason
from mimo.store import EmbeddingStore, Manifest, parse_key
from mimo.tensor import RawTensor

SCHEME = "media:"
MAX_UPLOAD_BYTES = 256 << 20
EXPIRES_S = 3600
LOCAL_BYTES = 512 << 20

_REFERENCE = re.compile(r"media_([0-9a-f]{64})")

# The store drops what is cheap to make again; an upload nobody but its client can make again.
_COST_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that was taken in. ``reference`` is ``media_<sha256 of the file>``."""

    reference: str
    modality: Modality
    num_bytes: int


class Uploads:
    """Bounded memory of uploads. A tenant sees its own alone."""

    def __init__(
        self,
        store: EmbeddingStore,
        *,
        max_bytes: int = LOCAL_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._clock = clock
        self._files: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # next to expire first
        self._held_bytes = 0

    async def add(self, data: bytes, tenant_salt: bytes, sha256: bytes = b"") -> Upload:
        """Keep a file. Raises InvalidRequest for what is no medium, or has another ``sha256``."""
        modality = default_modality(sniff(data))
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
        if sha256 and sha256 != digest:
            raise InvalidRequest(
                "the uploaded bytes do not have the announced SHA-256",
                reason=Reason.MEDIA_ENCODING,
                field="sha256",
            )
        reference = f"media_{digest.hex()}"
        name = _entry_name(reference, tenant_salt)
        self._remember(name, data)
        tensor = RawTensor("uint8", (len(data),), data)
        manifest = await asyncio.to_thread(
            lambda: Manifest.describe(
                parse_key(name), tensor, encoder_fingerprint="upload", encode_ms=_COST_MS
            )
        )
        await self._store.put(manifest, tensor)
        return Upload(reference, modality, len(data))

    async def get(self, url: str, tenant_salt: bytes) -> bytes | None:
        """The file behind ``media:<reference>``; None when it is unknown or has expired.

        Using it keeps it for as long again.
        """
        reference = url.removeprefix(SCHEME)
        if not _REFERENCE.fullmatch(reference):
            return None
        name = _entry_name(reference, tenant_salt)
        self._forget_expired()
        data = self._files[name][1] if name in self._files else None
        if data is None:
            found = await self._store.get(parse_key(name))
            if found.tensor is None:
                return None
            data = bytes(found.tensor.data)
        self._remember(name, data)
        return data

    def _remember(self, name: str, data: bytes) -> None:
        self._forget_expired()
        self._forget(name)
        self._files[name] = (self._clock() + EXPIRES_S, data)
        self._held_bytes += len(data)
        while self._held_bytes > self._max_bytes and len(self._files) > 1:
            self._forget(next(iter(self._files)))

    def _forget_expired(self) -> None:
        while self._files:
            name, (expires, _) = next(iter(self._files.items()))
            if self._clock() < expires:
                break
            self._forget(name)

    def _forget(self, name: str) -> None:
        if name in self._files:
            self._held_bytes -= len(self._files.pop(name)[1])


def _entry_name(reference: str, tenant_salt: bytes) -> str:
    """Store key of an upload: apart from embeddings, and apart between tenants."""
    digest = hashlib.sha256(b"upload\0" + len(tenant_salt).to_bytes(4, "big") + tenant_salt)
    digest.update(reference.encode())
    return digest.hexdigest()
