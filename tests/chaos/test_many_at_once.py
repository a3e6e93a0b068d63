"""Two hundred at once, all different: everybody is answered, memory stays where it was."""

import asyncio
import io
import random

import pytest
from PIL import Image

from models.training.synth.shapes import COLOURS, KINDS, Shape, finish, render
from tests.support.live import Stack, image
from tests.support.load import FACES, Answer, Clients, Question
from tests.support.vitals import resident_mib

NUM_REQUESTS = 200
DEADLINE_S = 120.0
MAX_GROWTH_MIB = 256.0


@pytest.mark.check
@pytest.mark.timeout(600)
async def test_two_hundred_pictures_at_once_are_two_hundred_right_answers(pair: Stack) -> None:
    pictures = [_picture(number) for number in range(NUM_REQUESTS)]
    questions = [
        Question(truth, (image(file), "What is in the picture?"), num_tokens=16)
        for file, truth in pictures
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
    # Nobody was given another's picture: nearly all say what is in their own.
    assert sum(a.text.startswith(a.question.name) for a in burst) > 0.8 * NUM_REQUESTS
    growth = {name: after[name] - before[name] for name in before}
    assert max(growth.values()) < MAX_GROWTH_MIB, growth
    print(  # noqa: T201
        f"longest {max(answer.seconds for answer in burst):.1f} s; growth in MiB: "
        + ", ".join(f"{name} {mib:.0f}" for name, mib in growth.items())
    )


def _picture(number: int) -> tuple[bytes, str]:
    """Two shapes side by side, and what the bundled model says of them when it is right."""
    chance = random.Random(number)
    looks = [(colour, kind) for colour in COLOURS for kind in KINDS]
    (left, one), (right, other) = chance.sample(looks, 2)
    shapes = (Shape(one, left, 0.27, 0.5, 0.18), Shape(other, right, 0.73, 0.5, 0.18))
    file = io.BytesIO()
    Image.fromarray(finish(render(shapes, 96, 96, (255, 255, 255), chance), chance)).save(
        file, "PNG"
    )
    return file.getvalue(), f"{_named(left, one)} to the left of {_named(right, other).lower()}."


def _named(colour: str, kind: str) -> str:
    return f"{'An' if colour[0] in 'aeiou' else 'A'} {colour} {kind}"
