"""Bytes out of text: data URLs and base64, as clients really write them."""

import binascii
import struct
import urllib.parse

from mimo.errors import InvalidRequest, Reason

# Without blanks, and out of the URL-safe alphabet.
_PLAIN = str.maketrans("-_", "+/", "\r\n\t\f ")
_MAX_PADDING = 2


def is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def decode_data_url(url: str) -> bytes:
    """The bytes of a ``data:`` URL. Its media type and parameters are only hints and are dropped.

    Raises InvalidRequest (MEDIA_ENCODING) unless it is well-formed base64.
    """
    header, comma, body = url[5:].partition(",")
    if not comma:
        raise _malformed("data URL has no comma")
    if header.rpartition(";")[2].strip().lower() != "base64":
        raise _malformed("data URL is not base64")
    return _decode(body)


def _malformed(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason=Reason.MEDIA_ENCODING, which="data_url")


def decode_base64(text: str) -> bytes:
    """Base64 in any common dress: a data URL around it, percent escapes, line breaks, the URL-safe
    alphabet, missing padding. Anything else raises InvalidRequest (MEDIA_ENCODING).

    Python's lenient decoder skips characters it does not know and so returns wrong bytes.
    """
    return decode_data_url(text) if is_data_url(text) else _decode(text)


def wav_from_pcm16(samples: bytes, sample_rate: int) -> bytes:
    """Give raw little-endian 16-bit mono samples the header that says so."""
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", 36 + len(samples), b"WAVE"),
        *(b"fmt ", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16),
        *(b"data", len(samples)),
    )
    return header + samples


def _decode(text: str) -> bytes:
    if "%" in text:
        text = urllib.parse.unquote(text)
    text = text.translate(_PLAIN)
    body = text.rstrip("=")
    if len(body) % 4 == 1 or len(text) - len(body) > _MAX_PADDING:
        raise InvalidRequest("base64 has an impossible length", reason=Reason.MEDIA_ENCODING)
    try:
        return binascii.a2b_base64(body + "=" * (-len(body) % 4), strict_mode=True)
    except ValueError as error:
        raise InvalidRequest(
            "base64 has invalid characters", reason=Reason.MEDIA_ENCODING
        ) from error
