"""Split = monolith: what four services compute together is what one process computes alone.

Equal bits need equal batches, so every medium is first asked about alone. The request that is then
compared finds all embeddings in the store and runs alone, without drafts and the prefix cache: one
step for the whole prompt, then one for each token.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from torch import Tensor

from gateway import assembly
from gateway.config import GatewayConfig
from gateway.generation import (
    CachePolicy,
    Delta,
    Event,
    GenerationRequest,
    SamplingParams,
    Speculation,
    Summary,
)
from gateway.model import Model
from gateway.pipeline import Pipeline
from mimo.metrics import AUDIO, GATEWAY, LLM, VISION, Metrics
from mimo.nn.interop import to_torch
from mimo.store import Manifest, Outcome
from mimo.store.memory_store import MemoryStore
from mimo.tensor import RawTensor
from models.generate import generate
from services.audio import __main__ as audio
from services.audio.settings import AudioSettings
from services.llm import __main__ as llm
from services.llm.settings import LlmSettings
from services.vision import __main__ as vision
from services.vision.settings import VisionSettings
from tests.support import monolith as mono
from tests.support import samples
from tests.support.gateway_stack import ask
from tests.support.monolith import Monolith, Piece
from tests.support.serving import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 24
QUESTION = "what do you see and hear?"

FIRST, SECOND = samples.png(1), samples.png(2, 70, 100)  # the second must be scaled
SOUND = samples.wav(1.0)
VIDEO = samples.mp4(samples.TWO_SECONDS, sound_s=1.5)
MEDIA = {"first": FIRST, "second": SECOND, "sound": SOUND, "video": VIDEO}

# Eight frames in two seconds: four are taken, both ends among them, and make two grids at 0 s and
# 1 s, so 6 rows of sound belong to the first grid and what is left to the second.
FRAMES_TAKEN = (0, 2, 4, 7)
ROWS_OF_FIRST_SECOND = 6


class RecordingStore(MemoryStore):
    """Remembers what encoders wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[RawTensor] = []

    async def put(
        self, manifest: Manifest, tensor: RawTensor, *, replace: bool = False
    ) -> Manifest | None:
        self.written.append(tensor)
        return await super().put(manifest, tensor, replace=replace)


@dataclass
class Answer:
    """What a request gave. ``logprobs`` are those of the tokens that are text, with their ids."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    summary: Summary | None = None

    @property
    def outcomes(self) -> set[Outcome | None]:
        assert self.summary is not None
        return {item.cache for item in self.summary.items}


@dataclass
class Sides:
    """The same checkpoint in the same dtype, split and whole."""

    pipeline: Pipeline
    store: RecordingStore
    whole: Monolith

    async def ask(self, *parts: str | bytes, **options: Any) -> Answer:
        fields: dict[str, Any] = {
            "sampling": SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
            "speculation": Speculation(enabled=False),
            "cache": CachePolicy(prefix=False),
            "return_token_ids": True,
            "top_logprobs": 0,
        }
        request: GenerationRequest = ask(*parts, **fields | options)
        answer = Answer()
        async for event in self.pipeline.generate(request):
            collect(answer, event)
        return answer

    def embeddings(self) -> dict[str, Tensor]:
        """The monolith's view of all media."""
        return {
            "first": self.whole.see(samples.picture(1)[None]),
            "second": self.whole.see(samples.picture(2, 70, 100)[None]),
            "sound": self.whole.hear(samples.sound_of(SOUND)),
            "video": self.whole.see(samples.frames_of(VIDEO, FRAMES_TAKEN)),
            "track": self.whole.hear(samples.sound_of(VIDEO)),
        }


def collect(answer: Answer, event: Event) -> None:
    match event:
        case Delta():
            answer.ids += event.token_ids
            answer.logprobs += [(entry.token_id, entry.logprob) for entry in event.logprobs]
        case Summary():
            answer.summary = event


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "mimo-tiny"
    generate(directory)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["float32", "bfloat16"])
async def sides(request: pytest.FixtureRequest, checkpoint: Path) -> AsyncIterator[Sides]:
    store = RecordingStore()
    common = {"model": str(checkpoint), "device": "cpu", "dtype": request.param, "threads": 1}
    async with AsyncExitStack() as stack:
        patches = stack.enter_context(pytest.MonkeyPatch.context())
        for module in (assembly, vision, audio, llm):
            patches.setattr(module, "open_store", lambda url, metrics: store)
        see, hear = VisionSettings(**common), AudioSettings(**common)
        speak = LlmSettings(**common, kv_memory_mib=16)
        running = [
            serving(see, Metrics(VISION), vision.vision_service),
            serving(hear, Metrics(AUDIO), audio.audio_service),
            serving(speak, Metrics(LLM), llm.llm_service),
        ]
        addresses = [await stack.enter_async_context(each) for each in running]
        config = GatewayConfig(
            model=str(checkpoint), vision=addresses[0], audio=addresses[1], llm=addresses[2]
        )
        model = Model.open(checkpoint)
        assembled = await stack.enter_async_context(
            assembly.assemble(config, model, Metrics(GATEWAY))
        )
        whole = Monolith(checkpoint, getattr(torch, request.param))
        yield Sides(assembled.pipeline, store, whole)


@pytest.fixture
def expected(sides: Sides) -> dict[str, Tensor]:
    return sides.embeddings()


@pytest_asyncio.fixture(loop_scope="module")
async def encoded(sides: Sides) -> None:
    """Every medium is in the store, encoded in a batch of its own."""
    for medium in MEDIA.values():
        await sides.ask(medium, sampling=SamplingParams(max_tokens=1))


def prompt(expected: dict[str, Tensor]) -> list[Piece]:
    """The conversation with all media, spelled out."""
    video, track = expected["video"], expected["track"]
    half = len(video) // 2
    return mono.user_turn(
        *mono.picture(expected["first"]),
        *mono.sound(expected["sound"]),
        *mono.picture(expected["second"]),
        *mono.video(
            *mono.grid("00:00", video[:half]),
            *mono.sound(track[:ROWS_OF_FIRST_SECOND]),
            *mono.grid("00:01", video[half:]),
            *mono.sound(track[ROWS_OF_FIRST_SECOND:]),
        ),
        QUESTION,
    )


@pytest.mark.usefixtures("encoded")
async def test_encoders_store_the_bytes_that_the_towers_compute(
    sides: Sides, expected: dict[str, Tensor]
) -> None:
    written = {bytes(tensor.data): tensor for tensor in sides.store.written}
    for name, rows in expected.items():
        tensor = written.pop(rows.contiguous().view(torch.uint8).numpy().tobytes(), None)
        assert tensor is not None, f"nobody stored the {name}"
        assert torch.equal(to_torch(tensor), rows)
    assert not written


@pytest.mark.usefixtures("encoded")
async def test_tokens_and_logprobs_have_the_same_bits(
    sides: Sides, expected: dict[str, Tensor]
) -> None:
    answer = await sides.ask(FIRST, SOUND, SECOND, VIDEO, QUESTION)
    said = sides.whole.answer(prompt(expected), NUM_TOKENS)
    assert answer.outcomes == {Outcome.HIT}
    assert answer.ids == [token.id for token in said]
    text_ids = {id for id, _ in answer.logprobs}
    assert len(answer.logprobs) > NUM_TOKENS // 2
    assert answer.logprobs == [(token.id, token.logprob) for token in said if token.id in text_ids]


async def test_text_alone_has_the_same_bits(sides: Sides) -> None:
    answer = await sides.ask("hello")
    turn = mono.user_turn()
    turn[1] = "user\nhello"  # joined before it is encoded
    assert answer.ids == [token.id for token in sides.whole.answer(turn, NUM_TOKENS)]


@pytest.mark.usefixtures("encoded")
async def test_drafts_change_no_token(sides: Sides, expected: dict[str, Tensor]) -> None:
    as_usual = {"speculation": Speculation(), "cache": CachePolicy()}
    answer = await sides.ask(FIRST, SOUND, SECOND, VIDEO, QUESTION, **as_usual)
    said = sides.whole.answer(prompt(expected), NUM_TOKENS)
    assert answer.summary is not None and sum(answer.summary.speculation.drafted) > 0
    assert answer.ids == [token.id for token in said]


async def test_the_samples_differ() -> None:
    """Equality of things that are all alike would prove nothing."""
    assert len({bytes(samples.png(number)) for number in range(3)}) == 3
    frames = samples.frames_of(VIDEO, FRAMES_TAKEN)
    assert len(np.unique(frames.reshape(len(frames), -1), axis=0)) == len(FRAMES_TAKEN)
