"""Whatever a decoder throws becomes an answer for the client."""

from collections.abc import Iterator
from contextlib import contextmanager

from mimo.errors import InvalidRequest, MimoError, Reason


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turn any exception of a decoder into InvalidRequest; ours pass.

    Decoders are fed hostile bytes and raise almost anything (OSError, SyntaxError, ValueError,
    KeyError, struct.error, ...), so the net is as wide as it can be. Their texts are not quoted:
    they may hold paths.
    """
    try:
        yield
    except MimoError:
        raise
    except MemoryError as error:
        raise InvalidRequest(
            f"{what} needs more memory to decode than allowed", reason=Reason.MEDIA_DECODE_FAILED
        ) from error
    except Exception as error:
        raise InvalidRequest(
            f"{what} is corrupt or truncated", reason=Reason.MEDIA_CORRUPT
        ) from error


def beyond(which: str, value: object, limit: object, message: str) -> InvalidRequest:
    """The error for exceeding a limit; ``which`` names it for machines."""
    return InvalidRequest(message, reason=Reason.MEDIA_LIMIT, which=which, value=value, limit=limit)
