"""A whole gateway pipeline over fake leaves: real gRPC, real media workers, a store in memory."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field

from gateway.backends.language_model import Sampling, TokenRequest
from gateway.conversation import Conversation, Message, Part, Role, TextPart
from gateway.embedding import Embedder
from gateway.generation import (
    CachePolicy,
    Delta,
    Event,
    GenerationRequest,
    Speculation,
    Started,
    Summary,
    TextKind,
)
from gateway.items import DecodedImage, MediaOptions, MediaPart, Modality, PlannedMedia
from gateway.media.decoder import MediaDecoder
from gateway.media.fetch import Fetcher, FetchPolicy
from gateway.media.limits import Limits
from gateway.media.workers import WorkerPool
from gateway.model import Model
from gateway.pipeline import MediaServices, Pipeline
from gateway.planning import MediaPlanner
from gateway.routing import ReplicaPool
from gateway.targets import FixedTargets
from gateway.uploads import Uploads
from mimo.metrics import AUDIO, LLM, VISION, Metrics
from mimo.store.base import EmbeddingStore
from mimo.store.memory_store import MemoryStore
from tests.support import byte_model
from tests.support.fake_leaves import (
    FakeAudio,
    FakeDecoder,
    FakeVision,
    serve_audio,
    serve_decoder,
    serve_vision,
)

NOBODY = "127.0.0.1:1"  # a port that refuses connections

OK = ((*b"o",), (*b"k",), (byte_model.IM_END,))  # a decoder's script


class CountingDecoder(MediaDecoder):
    """Remembers which jobs it was given."""

    jobs: list[str]

    async def plan(
        self,
        source: bytes,
        options: MediaOptions,
        *,
        expected: Modality | None,
        limits: Limits | None = None,
    ) -> PlannedMedia:
        self.jobs.append("plan")
        return await super().plan(source, options, expected=expected, limits=limits)

    async def decode_image(self, source: bytes, planned: PlannedMedia) -> DecodedImage:
        self.jobs.append("decode_image")
        return await super().decode_image(source, planned)


@dataclass
class Stack:
    """The pipeline under test and everything around it."""

    pipeline: Pipeline
    store: EmbeddingStore
    uploads: Uploads
    metrics: Metrics
    vision: list[FakeVision]
    audio: FakeAudio
    decoders: list[FakeDecoder]
    media_decoder: CountingDecoder
    pools: dict[str, ReplicaPool] = field(default_factory=dict)

    async def run(self, request: GenerationRequest) -> list[Event]:
        async with aclosing(self.pipeline.generate(request)) as events:
            return [event async for event in events]


@asynccontextmanager
async def open_stack(
    model: Model,
    workers: WorkerPool,
    *,
    num_vision: int = 1,
    num_decoders: int = 1,
    down: Sequence[str] = (),
    script: Sequence[Sequence[int]] = OK,
    limits: dict[str, int] | None = None,
    store: MemoryStore | None = None,
    fingerprint: str = "encoder",
) -> AsyncIterator[Stack]:
    """Components in ``down`` have an address where nobody listens; ``limits`` are the decoders'."""
    async with AsyncExitStack() as stack:
        store, metrics = store or MemoryStore(), Metrics("gateway")
        vision = [FakeVision(store, fingerprint) for _ in range(num_vision)]
        audio = FakeAudio(store, fingerprint)
        decoders = [FakeDecoder(store, script) for _ in range(num_decoders)]
        addresses = {
            VISION: [await stack.enter_async_context(serve_vision(leaf)) for leaf in vision],
            AUDIO: [await stack.enter_async_context(serve_audio(audio))],
            LLM: [await stack.enter_async_context(serve_decoder(d, limits)) for d in decoders],
        }
        pools: dict[str, ReplicaPool] = {}
        for component, found in addresses.items():
            targets = FixedTargets((NOBODY,) if component in down else tuple(found))
            pools[component] = ReplicaPool(component, targets, metrics)
            stack.push_async_callback(pools[component].close)
        assert model.processor is not None
        uploads = Uploads(store)
        fetcher = Fetcher(FetchPolicy())
        stack.callback(fetcher.close)
        media_decoder = CountingDecoder(workers, model.processor, Limits())
        media_decoder.jobs = []
        planner = MediaPlanner(
            media_decoder, model.processor, Limits(), fetcher, uploads, store, metrics
        )
        embedder = Embedder(
            pools[VISION], pools[AUDIO], store, media_decoder, planner, model.processor, metrics
        )
        pipeline = Pipeline(model, pools[LLM], MediaServices(planner, embedder), metrics)
        yield Stack(
            pipeline, store, uploads, metrics, vision, audio, decoders, media_decoder, pools
        )


def ask(*parts: str | bytes | MediaPart, **options: object) -> GenerationRequest:
    """A request of one user message. Bytes are media of whatever kind they hold."""
    content: list[Part] = []
    for part in parts:
        if isinstance(part, str):
            content.append(TextPart(part))
        else:
            content.append(MediaPart(None, part) if isinstance(part, bytes) else part)
    conversation = Conversation((Message(Role.USER, tuple(content)),))
    return GenerationRequest("req_test", conversation, **options)  # type: ignore[arg-type]


def text(events: Sequence[Event], choice: int = 0, kind: TextKind = TextKind.CONTENT) -> str:
    return "".join(
        event.text
        for event in events
        if isinstance(event, Delta) and event.choice_index == choice and event.kind is kind
    )


def started(events: Sequence[Event]) -> Started:
    assert isinstance(events[0], Started)
    return events[0]


def summary(events: Sequence[Event]) -> Summary:
    assert isinstance(events[-1], Summary)
    return events[-1]


def token_request() -> TokenRequest:
    """A call to a decoder: one prompt token, greedy."""
    sampling = Sampling(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=1,
        max_tokens=4,
        min_tokens=0,
        stop_token_ids=(),
        ignore_stop=False,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        banned_token_ids=(),
        bad_words=(),
        num_logprobs=None,
    )
    return TokenRequest([1], [], [], sampling, None, Speculation(), CachePolicy(), b"", 0, 0)
