"""The backends by name, in order of preference. Importing one waits until it is asked for."""

from mimo.errors import ConfigError
from mimo.nn.attention.base import AttentionBackend


def _native() -> AttentionBackend:
    from mimo.nn.attention.native import NativeBackend

    return NativeBackend()


def _sdpa() -> AttentionBackend:
    from mimo.nn.attention.sdpa import SdpaBackend

    return SdpaBackend()


def _reference() -> AttentionBackend:
    from mimo.nn.attention.reference import ReferenceBackend

    return ReferenceBackend()


_FACTORIES = {"native": _native, "sdpa": _sdpa, "reference": _reference}

BACKENDS = tuple(_FACTORIES)


def create(name: str) -> AttentionBackend:
    """A backend by name. Raises ConfigError for a name that is not in the registry."""
    factory = _FACTORIES.get(name)
    if factory is None:
        raise ConfigError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}")
    return factory()
