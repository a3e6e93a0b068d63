"""Which file of a model directory holds which tensor, read from safetensors headers alone."""

import hashlib
import json
import logging
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mimo.errors import CheckpointError

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
FINGERPRINT_CACHE_NAME = ".fingerprints.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
SECTIONS = ("audio_config", "numeric_profile", "processor_config", "vision_config")

FingerprintMode = Literal["content", "index"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. ``dtype`` is the safetensors name; ``offset`` counts from file start."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class CheckpointIndex:
    """A model directory: its configuration and the place of every tensor. No tensor is read."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, directory: str | Path) -> "CheckpointIndex":
        """Read config.json and the headers of all shards.

        Raises CheckpointError when a file is missing, damaged or contradicts another.
        """
        directory = Path(directory)
        config = _read_json(directory / "config.json")
        for name in SECTIONS:
            if not isinstance(config.get(name), dict | None):
                raise CheckpointError(f"config.json: {name} is {config[name]!r}, not an object")
        if (directory / INDEX_NAME).exists():
            return cls(directory, config, _from_weight_map(directory))
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"no *.safetensors file in {directory}")
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in _read_header(file).items():
                if name in tensors:
                    other = tensors[name].file.name
                    raise CheckpointError(f"tensor {name} is in both {other} and {file.name}")
                tensors[name] = info
        return cls(directory, config, tensors)

    def select(self, wanted: str | Iterable[str] | Callable[[str], bool]) -> dict[str, TensorInfo]:
        """The tensors under a prefix, under any of several, or for which a predicate holds."""
        if callable(wanted):
            return {name: info for name, info in self.tensors.items() if wanted(name)}
        prefixes = (wanted,) if isinstance(wanted, str) else tuple(wanted)
        return {name: info for name, info in self.tensors.items() if name.startswith(prefixes)}

    def fingerprint(
        self,
        names: Iterable[str],
        *,
        mode: FingerprintMode = "content",
        cache_directory: Path | None = None,
    ) -> str:
        """SHA-256 over names, dtypes, shapes and, in mode "content", the bytes of the tensors.

        Content hashes are kept in ``.fingerprints.json`` beside the model, or in
        ``cache_directory``, and hold as long as no shard changes size or modification time. Mode
        "index" reads no weights: two checkpoints of equal shapes look alike to it.
        """
        chosen = {name: self.tensors[name] for name in sorted(names)}
        if mode == "index":
            return _digest(_describe(chosen))
        stamp = _digest(_describe(chosen) + _describe_files(chosen))
        cache = (cache_directory or self.directory) / FINGERPRINT_CACHE_NAME
        known = _read_cache(cache).get(stamp)
        if known is not None:
            return known
        fingerprint = _digest(_describe(chosen) + _hash_contents(chosen))
        _remember(cache, stamp, fingerprint)
        return fingerprint


def _from_weight_map(directory: Path) -> dict[str, TensorInfo]:
    weight_map = _read_json(directory / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{directory / INDEX_NAME} has no weight_map")
    headers = {file: _read_header(directory / file) for file in sorted(set(weight_map.values()))}
    tensors = {}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointError(f"tensor {name} is not in {file}, where {INDEX_NAME} places it")
        tensors[name] = headers[file][name]
    for file, header in headers.items():
        for name in header:
            if weight_map.get(name) != file:
                raise CheckpointError(f"tensor {name} of {file} is not in {INDEX_NAME}")
    return tensors


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """The header is a 64-bit length and that many bytes of JSON; the tensors follow."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, MAX_HEADER_BYTES):
                raise CheckpointError(f"{file} announces a header of {length} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = TensorInfo(
                file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin
            )
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from error
    end = max((info.offset + info.nbytes for info in tensors.values()), default=0)
    if end > size:
        raise CheckpointError(f"{file} is truncated: it has {size} bytes, its tensors need {end}")
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def _describe(tensors: Mapping[str, TensorInfo]) -> list[Any]:
    return [[name, info.dtype, list(info.shape)] for name, info in tensors.items()]


def _describe_files(tensors: Mapping[str, TensorInfo]) -> list[Any]:
    files = sorted({info.file for info in tensors.values()})
    stats = [(file.name, file.stat()) for file in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _hash_contents(tensors: Mapping[str, TensorInfo]) -> list[str]:
    hashes = []
    for info in tensors.values():
        digest, left = hashlib.sha256(), info.nbytes
        with info.file.open("rb") as stream:
            stream.seek(info.offset)
            while left:
                piece = stream.read(min(left, 1 << 22))
                if not piece:
                    raise CheckpointError(f"{info.file} became shorter while it was read")
                digest.update(piece)
                left -= len(piece)
        hashes.append(digest.hexdigest())
    return hashes


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()


def _read_cache(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _remember(path: Path, stamp: str, fingerprint: str) -> None:
    """Write the cache atomically. A read-only place only costs hashing again at the next start."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(_read_cache(path) | {stamp: fingerprint}, indent=1))
        temporary.replace(path)
    except OSError as error:
        logger.info("fingerprint of the weights is not cached: %s", error)
