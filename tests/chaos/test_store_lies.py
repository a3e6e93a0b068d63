"""Entries of the store are damaged in every way there is, and every answer stays right."""

import contextlib
import random
from collections.abc import Callable

import pytest
import redis

from mimo.store.layout import CHUNKS, MANIFESTS, PLANS
from tests.support import samples
from tests.support.live import Stack, audio, image, video
from tests.support.load import FACES, Clients, Question

SEED = 5
NUM_CORRUPTIONS = 50

PICTURE, OTHER, SOUND = image(samples.png(21)), image(samples.png(22)), audio(samples.wav(0.9))
QUESTIONS = (
    Question("picture", (PICTURE, "what is it?"), num_tokens=12),
    Question("two", (PICTURE, OTHER, "?"), seed=3, num_tokens=12),
    Question("sound", (SOUND, "what do you hear?"), num_tokens=12),
    Question("video", (video(samples.mp4()), "what happens?"), num_tokens=12),
)

ENCODERS = ("vision", "audio")

Server = redis.Redis


def flip(server: Server, names: list[bytes], chance: random.Random) -> str:
    """One bit of one value."""
    name = chance.choice(names)
    value = bytearray(server.get(name) or b"?")
    value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
    server.set(name, bytes(value), keepttl=True)
    return f"flipped a bit of {name!r}"


def drop(server: Server, names: list[bytes], chance: random.Random) -> str:
    name = chance.choice(names)
    server.delete(name)
    return f"deleted {name!r}"


def truncate(server: Server, names: list[bytes], chance: random.Random) -> str:
    name = chance.choice(names)
    value = server.get(name) or b"?"
    server.set(name, value[: chance.randrange(len(value))], keepttl=True)
    return f"truncated {name!r}"


def lengthen(server: Server, names: list[bytes], chance: random.Random) -> str:
    name = chance.choice(names)
    server.append(name, b"!")
    return f"lengthened {name!r}"


def swap(server: Server, names: list[bytes], chance: random.Random) -> str:
    """The values of two names: an entry's place in another's, a chunk where a plan belongs."""
    one, other = chance.sample(names, 2)
    first, second = server.get(one) or b"?", server.get(other) or b"?"
    server.set(one, second, keepttl=True)
    server.set(other, first, keepttl=True)
    return f"swapped {one!r} and {other!r}"


HARMS: tuple[Callable[[Server, list[bytes], random.Random], str], ...] = (
    flip,
    drop,
    truncate,
    lengthen,
    swap,
)


@pytest.mark.check
@pytest.mark.timeout(600)
async def test_fifty_corruptions_change_no_answer(pair: Stack) -> None:
    chance = random.Random(SEED)
    (entry,) = pair.processes("redis")
    async with Clients.opened(pair.rest_url, pair.grpc_address) as clients:
        calm = [await clients.ask(question, "grpc") for question in QUESTIONS]
        assert [answer.error for answer in calm] == [""] * len(QUESTIONS)
        expected = {answer.question.name: answer.said for answer in calm}
        with contextlib.closing(redis.Redis.from_url(entry["address"])) as server:
            server.flushall()  # what other tests left would be hurt instead
            done: list[str] = []
            for _ in range(NUM_CORRUPTIONS):
                for question in QUESTIONS:  # what the last harm removed is there again
                    await clients.ask(question, "grpc")
                kind = chance.choice((MANIFESTS, CHUNKS, CHUNKS, PLANS))
                names = sorted(server.scan_iter(kind, 1000))
                done.append(chance.choice(HARMS)(server, names, chance))
                for question in QUESTIONS:
                    answer = await clients.ask(question, chance.choice(FACES))
                    assert answer.error == "", done[-1]
                    assert answer.said == expected[question.name], (question.name, done[-1])
    repaired = sum(pair.total(r, "mimo_encoder_items_total", outcome="repaired") for r in ENCODERS)
    assert repaired > NUM_CORRUPTIONS // 4
