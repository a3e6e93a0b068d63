"""URLs of clients, parsed once and strictly.

Parsers disagree about odd URLs, and that is how guards are fooled; so whatever two of them might
read differently is refused, and what is left is taken apart here and nowhere else.
"""

import ipaddress
import re
import unicodedata
import urllib.parse
from dataclasses import dataclass

import idna

from mimo.errors import InvalidRequest, Reason

MAX_LENGTH = 2048

_PARTS = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/?#]*)(?P<target>[^#]*)", re.I)
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f-\xa0\\\ud800-\udfff]|%00")
_HOST_AND_PORT = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>\d{0,5}))?")
_NAME = re.compile(r"(?=.{1,253}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9-]{1,63}")
_NUMERIC_LABEL = re.compile(r"\d+|0x[0-9a-f]*")
_TARGET_SAFE = "!$&'()*+,/:;=?@[]~%-._"

_LOCAL_SUFFIXES = (
    *("localhost", "local", "internal", "home.arpa", "lan", "intranet", "onion", "test"),
    *("cluster.local", "svc"),
)


@dataclass(frozen=True, slots=True)
class ParsedUrl:
    """``host`` is lower-case ASCII, without brackets; ``target`` is path and query."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def is_literal(self) -> bool:
        """Whether the host is an address rather than a name."""
        return (
            ":" in self.host or _NUMERIC_LABEL.fullmatch(self.host.rpartition(".")[2]) is not None
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        port = "" if self.port == default else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.target}"


def parse_url(url: str) -> ParsedUrl:
    """Raises InvalidRequest (URL_INVALID, or URL_BLOCKED for names of local networks)."""
    if len(url) > MAX_LENGTH:
        raise _invalid(f"longer than {MAX_LENGTH} characters")
    if _FORBIDDEN.search(url):
        raise _invalid("holds blanks, control characters or a backslash")
    parts = _PARTS.match(url)
    if parts is None:
        raise _invalid("not an http or https URL")
    scheme = parts["scheme"].lower()
    if "@" in parts["authority"]:
        raise _invalid("holds a user name")
    authority = _HOST_AND_PORT.fullmatch(parts["authority"])
    if authority is None or not authority["host"]:
        raise _invalid("has no valid host")
    target = urllib.parse.quote(parts["target"], safe=_TARGET_SAFE)
    return ParsedUrl(
        scheme=scheme,
        host=_host(authority["host"]),
        port=_port(authority["port"], scheme),
        target=target if target.startswith("/") else "/" + target,
    )


def resolve_location(base: ParsedUrl, location: str) -> ParsedUrl:
    """Where a redirect leads. Raises InvalidRequest like ``parse_url``."""
    if _FORBIDDEN.search(location):
        raise _invalid("redirects to a URL with forbidden characters")
    return parse_url(urllib.parse.urljoin(str(base), location))


def _host(host: str) -> str:
    if host.startswith("["):
        return _ipv6(host[1:-1])
    try:
        name = idna.encode(unicodedata.normalize("NFC", host), uts46=True).decode().lower()
    except (idna.IDNAError, UnicodeError) as error:
        raise _invalid("has an invalid host name") from error
    name = name.removesuffix(".")
    if not _NAME.fullmatch(name):
        raise _invalid("has an invalid host name")
    if _NUMERIC_LABEL.fullmatch(name.rpartition(".")[2]):
        return _ipv4(name)
    if "." not in name or name.endswith(tuple("." + suffix for suffix in _LOCAL_SUFFIXES)):
        raise InvalidRequest("this URL is not allowed", reason=Reason.URL_BLOCKED)
    return name


def _ipv4(host: str) -> str:
    """Only the plain dotted quad: resolvers also read 127.1, 0x7f000001 and 017700000001."""
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError as error:
        raise _invalid("has an address that is not four plain numbers") from error


def _ipv6(host: str) -> str:
    try:
        if "%" in host:
            raise ValueError(host)
        return str(ipaddress.IPv6Address(host))
    except ValueError as error:
        raise _invalid("has an invalid IPv6 address") from error


def _port(text: str | None, scheme: str) -> int:
    if not text:
        return 443 if scheme == "https" else 80
    port = int(text)
    if not 0 < port <= 65535:
        raise _invalid("has an invalid port")
    return port


def _invalid(why: str) -> InvalidRequest:
    return InvalidRequest(f"invalid URL: {why}", reason=Reason.URL_INVALID)
