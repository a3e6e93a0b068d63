"""Two hundred at once, all different: everybody is answered, memory stays where it was."""

import asyncio

import pytest

from tests.support import samples
from tests.support.live import Stack, image
from tests.support.load import FACES, Answer, Clients, Question
from tests.support.vitals import resident_mib

NUM_REQUESTS = 200
DEADLINE_S = 120.0
MAX_GROWTH_MIB = 256.0


@pytest.mark.check
@pytest.mark.timeout(600)
async def test_two_hundred_pictures_at_once_are_two_hundred_right_answers(pair: Stack) -> None:
    questions = [
        Question(f"picture {number}", (image(_picture(number)), "what is it?"), num_tokens=4)
        for number in range(NUM_REQUESTS)
    ]
    before = resident_mib(pair)
    async with Clients.opened(pair.rest_url, pair.grpc_address) as clients:
        burst = await asyncio.gather(
            *(
                clients.ask(question, FACES[number % 2], timeout_s=DEADLINE_S)
                for number, question in enumerate(questions)
            )
        )
        after = resident_mib(pair)
        assert [f"{a.question.name}: {a.code} {a.error}" for a in burst if a.error] == []
        # The same questions in peace; few at a time.
        turn = asyncio.Semaphore(4)

        async def ask_again(question: Question) -> Answer:
            async with turn:
                return await clients.ask(question, "grpc")

        calm = await asyncio.gather(*map(ask_again, questions))
    assert [answer.said for answer in burst] == [answer.said for answer in calm]
    assert len({tuple(answer.token_ids) for answer in calm}) > NUM_REQUESTS // 2
    growth = {name: after[name] - before[name] for name in before}
    assert max(growth.values()) < MAX_GROWTH_MIB, growth
    print(  # noqa: T201
        f"longest {max(answer.seconds for answer in burst):.1f} s; growth in MiB: "
        + ", ".join(f"{name} {mib:.0f}" for name, mib in growth.items())
    )


def _picture(number: int) -> bytes:
    """A picture of its own: 96 x 128 and a few pixels, of which no two are equal."""
    return samples.png(1000 + number, 96 + 32 * (number % 3), 128)
