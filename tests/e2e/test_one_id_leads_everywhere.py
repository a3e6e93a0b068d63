"""One request id finds a request in the logs of every process that worked for it."""

from pathlib import Path

import pytest

from tests.support import samples
from tests.support.live import Stack, audio, eventually, image
from tests.support.load import FACES, Clients, Question

QUESTION = Question("both", (image(samples.png(31)), audio(samples.wav(0.5)), "?"), num_tokens=4)
ROLES = ("gateway", "vision", "audio", "llm")


@pytest.mark.parametrize("face", FACES)
async def test_a_request_id_is_in_the_logs_of_all_four(stack: Stack, face: str) -> None:
    request_id = f"find-me-by-{face}"
    async with Clients.opened(stack.rest_url, stack.grpc_address) as clients:
        answer = await clients.ask(QUESTION, face, salt=face, request_id=request_id)
    assert answer.error == ""
    home = Path(stack.state["store"].removeprefix("unix://")).parent

    def found_in(role: str) -> bool:
        logs = (path.read_text() for path in home.glob(f"{role}-*.log"))
        return any(f"request_id={request_id}" in log for log in logs)

    eventually("every role has logged it", lambda: all(map(found_in, ROLES)), 10.0)
