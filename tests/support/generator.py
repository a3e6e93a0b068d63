"""Questions in a process of its own, so that it can be nicer than the servers.

    python -m tests.support.generator '{"rest": "http://…", "workers": 16, "seconds": 10, …}'
    python -m tests.support.generator '{"rest": "http://…", "rate": 50, "seconds": 60, …}'

With ``workers`` a closed loop, with ``rate`` an open one at random moments (a Poisson process).
HTTP is spoken by hand, because a library for it costs as much as the gateway that is under test.
Prints one JSON object: how many were sent, how many answered, the seconds from the first question
to the last one sent and to the last answer. What became of each is in the log of the gateway, which
is not nice and therefore on time.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from mimo.cli.load.loops import closed_loop, open_loop, poisson
from tests.support import samples
from tests.support.live import Part, image, rest_body

SHARE_OF_PICTURES = 0.3
NUM_PICTURES = 8
SALT = "cache salt of the question"  # makes each one nobody has asked before
NICENESS = 5


def main() -> int:
    _be_nice()
    print(json.dumps(asyncio.run(_generate(json.loads(sys.argv[1])))))  # noqa: T201
    return 0


def _be_nice() -> None:
    """Towards all processes: where the kernel shares time by session, a plain nice value counts
    only among the processes of one session, and every server lives in its own."""
    os.nice(NICENESS)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICENESS))


class Asker:
    """Asks questions by REST: most are text alone, some are about one of a few pictures."""

    def __init__(self, rest_url: str, deadline_s: float) -> None:
        address = urlsplit(rest_url)
        self._host, self._port = str(address.hostname), int(address.port or 80)
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\n"
            f"content-type: application/json\r\n"
            f"x-request-timeout-ms: {round(1000 * deadline_s)}\r\n"
        )
        self._text = _body("tell me a story")
        self._pictures = [
            _body(image(samples.png(60 + number)), "what is it?") for number in range(NUM_PICTURES)
        ]

    async def ask(self, salt: str) -> bool:
        """Whether it was answered to the end."""
        chance = random.Random(salt)
        body = self._text
        if chance.random() < SHARE_OF_PICTURES:
            body = chance.choice(self._pictures)
        body = body.replace(SALT, salt)
        request = f"{self._head}content-length: {len(body)}\r\n\r\n{body}".encode()
        loop = asyncio.get_running_loop()
        said = loop.create_future()
        try:
            await loop.create_connection(lambda: _Exchange(request, said), self._host, self._port)
        except OSError:
            return False
        answer = await said
        return b"data: [DONE]" in answer and b'data: {"error"' not in answer


class _Exchange(asyncio.Protocol):
    """Sends one request and hands on all that comes back."""

    def __init__(self, request: bytes, said: "asyncio.Future[bytes]") -> None:
        self._request = request
        self._said = said
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._said.done():
            self._said.set_result(bytes(self._received))


def _body(*parts: Part) -> str:
    return json.dumps(
        rest_body(
            *parts, stream=True, cache_salt=SALT, temperature=0.0, max_tokens=16, ignore_eos=True
        )
    )


async def _generate(config: dict[str, Any]) -> dict[str, Any]:
    asker = Asker(config["rest"], config["deadline_s"])
    name, seconds = config["name"], config["seconds"]
    began = last_sent = time.monotonic()

    async def ask(number: int, due: float = 0.0) -> bool:
        nonlocal last_sent
        last_sent = time.monotonic()
        return await asker.ask(f"{name} {number}")

    if "workers" in config:
        numbers = _numbers_until(began + seconds)
        answers = await closed_loop(ask, numbers, workers=config["workers"])
    else:
        moments = poisson(config["rate"], config["seed"])
        arrivals = itertools.takewhile(lambda moment: moment < seconds, moments)
        answers = await open_loop(ask, arrivals)
    return {
        "sent": len(answers),
        "answered": sum(answers),
        "sending_seconds": last_sent - began,
        "seconds": time.monotonic() - began,
    }


def _numbers_until(end: float) -> Iterator[int]:
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.count())


if __name__ == "__main__":
    sys.exit(main())
