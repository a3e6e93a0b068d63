"""Client of the decoder: tokens and items up, tokens down. One call is one sequence."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from gateway.backends.faults import garbage, upstream_error
from gateway.backends.replica import Replica
from gateway.backends.sending import is_cancelled, send
from gateway.backends.stall import StallWatch
from gateway.generation import CachePolicy, FinishReason, Grammar, GrammarKind, Speculation
from gateway.items import Modality
from gateway.prompt.answer import Token
from gateway.prompt.placeholders import Span
from mimo.errors import Unavailable
from mimo.rpc.channel import call_metadata
from mimo.rpc.tensors import chunks_to_proto, header_to_proto
from mimo.store.base import Outcome
from mimo.store.keys import EmbeddingKey
from mimo.store.wire import MODALITY_TO_PROTO
from mimo.tensor import RawTensor
from mimo.v1 import llm_pb2, llm_pb2_grpc

# Between two deliveries of a sequence. A preempted one waits for blocks of others; not that long.
STALL_S = 30.0

_FINISH_REASONS = {
    llm_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    llm_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, every default filled in. ``top_k`` 0 keeps all."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_stop: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    banned_token_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    num_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Embedding:
    """An embedding [num_rows, D] exists: in the store under ``manifest_digest``, or in ``tensor``.

    ``encode_ms`` is the device time this request caused.
    """

    manifest_digest: bytes
    tensor: RawTensor | None
    outcome: Outcome
    encode_ms: float


@dataclass(frozen=True, slots=True)
class DecoderItem:
    """One embedding [num_rows, hidden_size] of a request; ``embedding`` resolves when it exists."""

    modality: Modality
    key: EmbeddingKey
    num_rows: int
    hidden_size: int
    dtype: str
    encoder_fingerprint: str
    embedding: asyncio.Future[Embedding]


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One sequence to continue. ``prior_output_ids`` are what an earlier call already produced."""

    prompt_ids: Sequence[int]
    items: Sequence[DecoderItem]
    spans: Sequence[Span]
    sampling: Sampling
    grammar: Grammar | None
    speculation: Speculation
    cache: CachePolicy
    cache_salt: bytes
    choice_index: int
    priority: int
    prior_output_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class DecoderStarted:
    queue_ms: float
    cached_tokens: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class DecoderTokens:
    """Sampled tokens; the first is at output position ``first_index``, prior ids counted."""

    first_index: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class DecoderFinished:
    """``drafted`` and ``accepted`` count draft tokens by position."""

    reason: FinishReason
    stop_token_id: int | None
    cached_tokens: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    queue_ms: float
    prefill_ms: float
    first_token_ms: float


DecoderEvent = DecoderStarted | DecoderTokens | DecoderFinished


async def generate_tokens(
    replica: Replica, request: TokenRequest, timeout_s: float
) -> AsyncGenerator[DecoderEvent, None]:
    """Run one call. Closing the iterator cancels it.

    An item whose future fails ends the call with that error. Raises Unavailable for a decoder that
    breaks off, falls silent, makes no progress or talks nonsense.
    """
    call: Any = llm_pb2_grpc.LanguageModelStub(replica.channel).GenerateTokens(
        timeout=timeout_s, metadata=call_metadata()
    )
    feeder = _Feeder(call, request)
    feeding = asyncio.create_task(feeder.run())
    stall = StallWatch(feeder.fail, STALL_S)
    try:
        with replica.call(feeder.fail), contextlib.closing(stall):
            while (response := await call.read()) is not grpc.aio.EOF:
                stall.pause()  # while our reader is the one who takes time
                event = _event_from_proto(response)
                yield event
                # Before the first token a queue or a missing item may hold things up.
                if isinstance(event, DecoderTokens):
                    stall.resume()
                if isinstance(event, DecoderFinished):
                    with contextlib.suppress(grpc.RpcError):
                        await call.read()  # the end, so that the peer is not cut off
                    return
        raise Unavailable("the decoder ended the call without finishing")
    except grpc.RpcError as error:
        raise feeder.error or upstream_error(error) from None
    except asyncio.CancelledError:
        if feeder.error is None or is_cancelled():
            raise
        raise feeder.error from None
    finally:
        call.cancel()
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


class _Feeder:
    """The sending half of a call: the start, then each pending item as it becomes ready.

    When the call ends early the reading half knows why; ``error`` is what went wrong on this side.
    """

    def __init__(self, call: Any, request: TokenRequest) -> None:
        self._call = call
        self._request = request
        self.error: BaseException | None = None

    async def run(self) -> None:
        try:
            async for message in self._messages():
                if not await send(self._call, message):
                    return
            await self._call.done_writing()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the call with an error of this side."""
        self.error = error
        self._call.cancel()

    async def _messages(self) -> AsyncIterator[llm_pb2.GenerateTokensRequest]:
        start = _start_to_proto(self._request)
        yield llm_pb2.GenerateTokensRequest(start=start)
        waiting: dict[asyncio.Future[Embedding], list[int]] = {}
        for index, item in enumerate(self._request.items):
            if start.items[index].state != llm_pb2.ITEM_STATE_STORED:
                waiting.setdefault(item.embedding, []).append(index)
        while waiting:
            # Never awaited directly: a cancelled await would cancel what other calls wait for.
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for embedding in done:
                for index in waiting.pop(embedding):
                    for message in _ready_messages(index, embedding.result()):
                        yield message


def _ready_messages(index: int, ready: Embedding) -> Iterator[llm_pb2.GenerateTokensRequest]:
    if ready.tensor is None:
        item_ready = llm_pb2.ItemReady(item_index=index, manifest_digest=ready.manifest_digest)
        yield llm_pb2.GenerateTokensRequest(item_ready=item_ready)
        return
    for chunk in chunks_to_proto(ready.tensor):
        item_chunk = llm_pb2.ItemChunk(item_index=index, chunk=chunk)
        yield llm_pb2.GenerateTokensRequest(item_chunk=item_chunk)


def _start_to_proto(request: TokenRequest) -> llm_pb2.GenerateTokensStart:
    return llm_pb2.GenerateTokensStart(
        prompt_ids=request.prompt_ids,
        prior_output_ids=request.prior_output_ids,
        items=[_item_to_proto(item) for item in request.items],
        spans=[
            llm_pb2.Span(
                item_index=span.item_index,
                prompt_offset=span.prompt_offset,
                length=span.length,
                row_offset=span.row_offset,
            )
            for span in request.spans
        ],
        sampling=_sampling_to_proto(request.sampling),
        grammar=_grammar_to_proto(request.grammar),
        speculation=llm_pb2.Speculation(
            enabled=request.speculation.enabled,
            max_draft_tokens=request.speculation.max_draft_tokens,
        ),
        cache=llm_pb2.CachePolicy(prefix=request.cache.prefix),
        cache_salt=request.cache_salt,
        choice_index=request.choice_index,
        priority=request.priority,
    )


def _item_to_proto(item: DecoderItem) -> llm_pb2.MediaItem:
    digest = b""
    if not item.embedding.done() or item.embedding.exception() is not None:
        state = llm_pb2.ITEM_STATE_PENDING
    elif item.embedding.result().tensor is not None:
        state = llm_pb2.ITEM_STATE_INLINE
    else:
        state = llm_pb2.ITEM_STATE_STORED
        digest = item.embedding.result().manifest_digest
    return llm_pb2.MediaItem(
        modality=MODALITY_TO_PROTO[item.modality],
        key=item.key,
        embedding=header_to_proto(item.dtype, (item.num_rows, item.hidden_size)),
        state=state,
        manifest_digest=digest,
        encoder_fingerprint=item.encoder_fingerprint,
    )


def _sampling_to_proto(sampling: Sampling) -> llm_pb2.Sampling:
    return llm_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_stop=sampling.ignore_stop,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        banned_token_ids=sampling.banned_token_ids,
        num_logprobs=sampling.num_logprobs,
        bad_words=[llm_pb2.TokenSequence(ids=ids) for ids in sampling.bad_words],
    )


def _grammar_to_proto(grammar: Grammar | None) -> llm_pb2.Grammar | None:
    if grammar is None:
        return None
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return llm_pb2.Grammar(json_schema=grammar.source)
        case GrammarKind.REGEX:
            return llm_pb2.Grammar(regex=grammar.source)
        case GrammarKind.LARK:
            return llm_pb2.Grammar(lark=grammar.source)


def _event_from_proto(response: llm_pb2.GenerateTokensResponse | None) -> DecoderEvent:
    if response is None:  # what gRPC makes of a message that it cannot parse
        raise garbage("the decoder", "an unreadable event")
    match response.WhichOneof("event"):
        case "started":
            started = response.started
            return DecoderStarted(started.queue_ms, started.cached_tokens, started.fingerprint)
        case "tokens":
            tokens = response.tokens
            return DecoderTokens(tokens.first_index, _tokens_from_proto(tokens))
        case "finished":
            finished = response.finished
            has_stop_id = finished.HasField("stop_token_id")
            return DecoderFinished(
                reason=_FINISH_REASONS.get(finished.reason, FinishReason.STOP),
                stop_token_id=finished.stop_token_id if has_stop_id else None,
                cached_tokens=finished.cached_tokens,
                drafted=tuple(finished.drafted),
                accepted=tuple(finished.accepted),
                queue_ms=finished.queue_ms,
                prefill_ms=finished.prefill_ms,
                first_token_ms=finished.first_token_ms,
            )
        case unknown:
            raise garbage("the decoder", f"unknown event {unknown}")


def _tokens_from_proto(tokens: llm_pb2.GeneratedTokens) -> tuple[Token, ...]:
    if not tokens.logprobs:
        return tuple(map(Token, tokens.ids))
    if len(tokens.logprobs) != len(tokens.ids):
        raise garbage("the decoder", f"{len(tokens.logprobs)} logprobs of {len(tokens.ids)} ids")
    return tuple(
        Token(
            id, logprobs.logprob, tuple(zip(logprobs.top_ids, logprobs.top_logprobs, strict=False))
        )
        for id, logprobs in zip(tokens.ids, tokens.logprobs, strict=True)
    )
