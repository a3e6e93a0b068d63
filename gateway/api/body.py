"""Reading a JSON body: strictly, within limits, and never by trusting what it claims to be."""

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from gateway.api.errors import UnsupportedBody
from gateway.intake import PATIENCE_S, collect
from gateway.offload import offload
from mimo.errors import Cancelled, InvalidRequest, Reason

MAX_BODY_BYTES = 64 << 20
MAX_DEPTH = 64
_ADVICE = "; large media go by POST /v1/media or by URL"
_AT_ONCE_BYTES = 1 << 20  # on the event loop

ParsedT = TypeVar("ParsedT")

_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json", re.IGNORECASE)
_CHARSET = re.compile(r"charset=\"?([\w-]+)", re.IGNORECASE)
_SURROGATES = re.compile("[\ud800-\udfff]")


async def read_json(request: Request, parse: Callable[[dict[str, Any]], ParsedT]) -> ParsedT:
    """What ``parse`` makes of the body's object; of a large one, in a thread. Raises
    InvalidRequest, also as UnsupportedBody."""
    _check_json(request)
    body = await read_limited(request, MAX_BODY_BYTES, _ADVICE)
    return await offload(len(body), _AT_ONCE_BYTES, lambda: parse(parse_json(body)))


async def read_limited(
    request: Request, limit: int, advice: str = "", patience_s: float = PATIENCE_S
) -> bytes:
    """The raw body. Raises InvalidRequest (REQUEST_TOO_LARGE) as soon as it exceeds ``limit``, or
    before it is read when it says so itself; DeadlineExceeded when it comes too slowly, Cancelled
    when it breaks off. ``advice`` tells those who send too much what to do."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise UnsupportedBody(
            f"content-encoding {encoding[:40]!r} is not read; send the body as it is",
            "unsupported_encoding",
        )
    too_large = InvalidRequest(
        f"the request body is larger than {limit >> 20} MiB{advice}",
        reason=Reason.REQUEST_TOO_LARGE,
        limit=limit,
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    try:
        return await collect(request.stream(), limit, too_large, patience_s)
    except ClientDisconnect:
        raise Cancelled("the client went away") from None


def parse_json(body: bytes) -> dict[str, Any]:
    """UTF-8 JSON with an object at its root, without NaN, infinities or deep nesting.

    Nulls are left out at every level, for clients write null where they mean nothing; a lone
    surrogate, which is no character, becomes U+FFFD.
    """
    try:
        parsed = json.loads(
            body.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_float=_finite
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise _not_json(f"{error.msg} at {where}") from None
    except UnicodeDecodeError as error:
        raise _not_json(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise _not_json(f"nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise _not_json(str(error).partition(";")[0]) from None
    if not isinstance(parsed, dict):
        raise _not_json("it is no object")
    cleaned: dict[str, Any] = _clean(parsed, MAX_DEPTH)
    return cleaned


def _check_json(request: Request) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    kind = kind.strip()
    if kind and not _JSON_TYPE.fullmatch(kind):
        raise UnsupportedBody(
            f"content-type {kind[:80]!r} is not read; send -H 'content-type: application/json'",
            "unsupported_content_type",
        )
    charset = _CHARSET.search(parameters)
    if charset and charset[1].lower() not in ("utf-8", "utf8"):
        raise UnsupportedBody("the charset must be utf-8", "unsupported_content_type")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text:.20} is too large a number")
    return value


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, list | dict) and depth == 0:
        raise _not_json(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [_clean(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {
            _clean(key, depth): _clean(item, depth - 1)
            for key, item in value.items()
            if item is not None
        }
    return value


def _not_json(why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not a JSON object: {why}", reason=Reason.INVALID_JSON)
