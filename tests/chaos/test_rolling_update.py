"""One replica of each kind is told to stop and comes back, then the other, under steady load: no
request is lost, no answer changes, and each of them ends in peace."""

import asyncio
import os
import re
import signal

import pytest

from mimo.cli.load.loops import closed_loop
from mimo.rpc.channel import open_channel
from mimo.v1 import replica_pb2, replica_pb2_grpc
from tests.support import samples
from tests.support.faults import LEAVES, FaultInjector
from tests.support.live import PATIENCE_S, Stack, audio, image, video
from tests.support.load import FACES, Answer, Clients, Question, numbers_until

WORKERS = 4
ANSWERS_BETWEEN = 6  # while the system is whole, before the next replica has its turn
ENDED = re.compile(r"(\w+-\d) ended with status (-?\d+); starting it again")
IN_FLIGHT = re.compile(r"draining  in_flight=(\d+)")

# Large enough that an encode takes a while.
PICTURE, SOUND = image(samples.png(15, 512, 512)), audio(samples.wav(6.0))
CLIP = video(samples.mp4())
QUESTIONS = (
    Question("text", ("tell me a long story",), num_tokens=96),
    Question("picture", (PICTURE, "what is it?"), num_tokens=32),
    Question("sound", ("what do you hear?", SOUND), num_tokens=32),
    Question("everything", (PICTURE, SOUND, CLIP, "?"), num_tokens=24),
)


@pytest.mark.check
@pytest.mark.timeout(900)
async def test_a_rolling_update_loses_nothing(pair: Stack) -> None:
    whole = FaultInjector(pair, seed=0)  # strikes nobody here
    answers: list[Answer] = []
    first_line = len(pair.output)
    async with Clients.opened(pair.rest_url, pair.grpc_address) as clients:
        await whole.recovered()
        calm = [await clients.ask(question, "grpc") for question in QUESTIONS]
        assert [answer.error for answer in calm] == [""] * len(QUESTIONS)
        expected = {answer.question.name: answer.said for answer in calm}

        async def ask(number: int) -> None:
            question = QUESTIONS[number % len(QUESTIONS)]
            face = FACES[number // len(QUESTIONS) % 2]
            # A tenant's own question: no cache spares the encoders.
            answers.append(await clients.ask(question, face, salt=f"rolling {number}"))

        until = asyncio.Event()
        load = asyncio.create_task(closed_loop(ask, numbers_until(until), workers=WORKERS))
        try:
            for index in range(2):
                await _more_answers(answers)
                told = [pair.processes(role)[index] for role in LEAVES]
                for process in told:
                    await _until_busy(process["address"])
                    os.kill(process["pid"], signal.SIGTERM)
                for process in told:
                    await whole.recovered(process["pid"])
            await _more_answers(answers)
        finally:
            until.set()
            await load
    failed = [f"{a.question.name} by {a.face}: {a.code} {a.error}" for a in answers if a.error]
    assert failed == []
    assert [a.said for a in answers] == [expected[a.question.name] for a in answers]
    said = "".join(pair.output[first_line:])
    ends = sorted(ENDED.findall(said))
    assert ends == sorted((f"{role}-{index}", "0") for role in LEAVES for index in range(2))
    assert said.count("stopped  aborted=0") == len(ends)
    print(  # noqa: T201
        f"{len(answers)} answers, longest {max(answer.seconds for answer in answers):.2f} s; "
        f"in flight when told to stop: {', '.join(IN_FLIGHT.findall(said))}"
    )


async def _until_busy(address: str) -> None:
    """Wait until a replica says that it has work."""
    async with open_channel(address) as channel, asyncio.timeout(PATIENCE_S):
        call = replica_pb2_grpc.ReplicaStub(channel).WatchLoad(replica_pb2.WatchLoadRequest())
        async for report in call:
            if report.queued_work + report.running_work > 0:
                call.cancel()
                return


async def _more_answers(answers: list[Answer]) -> None:
    enough = len(answers) + ANSWERS_BETWEEN
    async with asyncio.timeout(PATIENCE_S):
        while len(answers) < enough:
            await asyncio.sleep(0.02)
