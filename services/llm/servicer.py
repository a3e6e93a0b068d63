"""LanguageModel on the wire: read a call, run it, answer.

The rows of pending and inline items arrive in the same stream while the prompt is prefilled up to
the first that is missing.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from torch import Tensor

from mimo import logs
from mimo.errors import (
    EmbeddingMissing,
    Internal,
    InvalidRequest,
    MimoError,
    Overloaded,
    Reason,
    Unavailable,
)
from mimo.rpc.deadline import deadline_of
from mimo.rpc.tensors import chunk_from_proto, header_from_proto
from mimo.rpc.upload import read_start
from mimo.store import Modality, parse_key
from mimo.store.wire import MODALITY_FROM_PROTO
from mimo.tensor import Assembler
from mimo.v1 import llm_pb2, llm_pb2_grpc
from services.llm.embeddings import EmbeddingPool, Hold, MediaItem, check_placement, rows_of
from services.llm.engine.core import Progress
from services.llm.engine.loop import Admitted, Engine, Event
from services.llm.engine.request import FinishReason, Request, SamplingParams, Span
from services.llm.engine.sampler import Sampled
from services.llm.grammars import GrammarCompiler, NoGrammars

logger = logging.getLogger(__name__)

_FINISH_REASONS = {
    FinishReason.STOP: llm_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: llm_pb2.FINISH_REASON_LENGTH,
}

# By reason, where it is not the caller's fault.
_ERRORS = {
    **{kind.default_reason: kind for kind in MimoError.__subclasses__()},
    **dict.fromkeys(
        (Reason.CAPACITY, Reason.CONCURRENCY, Reason.QUOTA, Reason.QUOTA_HARD), Overloaded
    ),
    Reason.DRAINING: Unavailable,
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a call is checked against."""

    fingerprint: str
    vocab_size: int
    hidden_size: int
    pad_ids: Mapping[Modality, int]


class LanguageModelServicer(llm_pb2_grpc.LanguageModelServicer):
    def __init__(
        self,
        engine: Engine,
        embeddings: EmbeddingPool,
        facts: ModelFacts,
        grammars: GrammarCompiler | NoGrammars,
    ) -> None:
        self._engine = engine
        self._grammars = grammars
        self._embeddings = embeddings
        self._facts = facts

    async def GenerateTokens(
        self,
        request_iterator: AsyncIterator[llm_pb2.GenerateTokensRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[llm_pb2.GenerateTokensResponse]:
        start = (await read_start(request_iterator)).start
        items = items_from_proto(start)
        request = request_from_proto(start, self._facts, self._engine.max_draft_tokens)
        request.deadline = deadline_of(context)
        if start.HasField("grammar"):
            request.grammar = await self._grammars.compile(start.grammar)
            if not all(request.grammar.accept(token_id) for token_id in start.prior_output_ids):
                raise InvalidRequest("not what the grammar allows", field="prior_output_ids")
        check_placement(
            start.prompt_ids, items, request.spans, self._facts.pad_ids, self._facts.hidden_size
        )
        with self._embeddings.hold(items) as hold:
            await self._fetch_stored(request, start, items)
            supplying = asyncio.create_task(self._supply(request, items, hold, request_iterator))
            try:
                async with contextlib.aclosing(self._engine.generate(request)) as events:
                    async for event in events:
                        for response in self._responses(request, event):
                            yield response
            finally:
                supplying.cancel()
                await asyncio.gather(supplying, return_exceptions=True)

    async def _fetch_stored(
        self, request: Request, start: llm_pb2.GenerateTokensStart, items: Sequence[MediaItem]
    ) -> None:
        stored = [
            item for item in items if start.items[item.index].state == llm_pb2.ITEM_STATE_STORED
        ]
        rows = await asyncio.gather(
            *(
                self._embeddings.fetch(item, start.items[item.index].manifest_digest)
                for item in stored
            )
        )
        for item, tensor in zip(stored, rows, strict=True):
            request.item_rows[item.index] = tensor
            request.pending_items.remove(item.index)

    async def _supply(
        self,
        request: Request,
        items: Sequence[MediaItem],
        hold: Hold,
        messages: AsyncIterator[llm_pb2.GenerateTokensRequest],
    ) -> None:
        """Hand missing items to the engine as they arrive; what goes wrong ends the request."""
        missing = set(request.pending_items)
        arrivals = _Arrivals(self._embeddings, hold, items, missing)
        try:
            while missing:
                message = await anext(messages, None)
                if message is None:
                    raise EmbeddingMissing("the call sent no more items", item_index=min(missing))
                arrived = await arrivals.take(message)
                if arrived is not None:
                    index, rows = arrived
                    missing.discard(index)
                    self._engine.supply(request, index, rows)
        except MimoError as error:
            self._engine.fail(request, error)
        except Exception:
            logger.exception("taking in an item failed")
            self._engine.fail(request, Internal("an item could not be taken in"))

    def _responses(self, request: Request, event: Event) -> list[llm_pb2.GenerateTokensResponse]:
        if isinstance(event, Admitted):
            started = llm_pb2.GenerationStarted(
                queue_ms=1000 * request.timing.queue_s,
                cached_tokens=request.num_found_tokens,
                fingerprint=self._facts.fingerprint,
            )
            return [llm_pb2.GenerateTokensResponse(started=started)]
        responses = []
        if event.tokens:
            responses.append(llm_pb2.GenerateTokensResponse(tokens=tokens_to_proto(event)))
        if event.finish_reason is not None:
            finished = finished_to_proto(request, event.finish_reason)
            responses.append(llm_pb2.GenerateTokensResponse(finished=finished))
        return responses


class _Arrivals:
    """Items on their way: announced in the store, or in pieces."""

    def __init__(
        self,
        embeddings: EmbeddingPool,
        hold: Hold,
        items: Sequence[MediaItem],
        missing: set[int],
    ) -> None:
        self._embeddings = embeddings
        self._hold = hold
        self._items = items
        self._missing = missing
        self._assemblers: dict[int, Assembler] = {}

    async def take(self, message: llm_pb2.GenerateTokensRequest) -> tuple[int, Tensor] | None:
        """The item that this message completes, with its rows. Raises what it reports."""
        match message.WhichOneof("message"):
            case "item_ready":
                item = self._item(message.item_ready.item_index)
                rows = await self._embeddings.fetch(item, message.item_ready.manifest_digest)
                return item.index, rows
            case "item_chunk":
                return self._add_chunk(message.item_chunk)
            case "item_failed":
                item = self._item(message.item_failed.item_index)
                raise _item_error(item, message.item_failed)
            case _:
                raise InvalidRequest("only items may follow the start", field="message")

    def _add_chunk(self, message: llm_pb2.ItemChunk) -> tuple[int, Tensor] | None:
        item = self._item(message.item_index)
        if item.index not in self._assemblers:
            self._hold.receive(item)
            self._assemblers[item.index] = Assembler(item.dtype, item.shape)
        assembler = self._assemblers[item.index]
        assembler.add(chunk_from_proto(message.chunk))
        if not assembler.is_complete:
            return None
        return item.index, rows_of(item, assembler.finish())

    def _item(self, index: int) -> MediaItem:
        if index not in self._missing:
            raise InvalidRequest(f"no rows are awaited for item {index}", field="item_index")
        return self._items[index]


def items_from_proto(start: llm_pb2.GenerateTokensStart) -> list[MediaItem]:
    """Raises InvalidRequest for an unknown modality, dtype or state, and for a malformed key."""
    items = []
    for index, item in enumerate(start.items):
        where = f"items[{index}]"
        if item.modality not in MODALITY_FROM_PROTO:
            raise InvalidRequest("unknown modality", field=f"{where}.modality")
        if item.state == llm_pb2.ITEM_STATE_UNSPECIFIED:
            raise InvalidRequest("where is the embedding?", field=f"{where}.state")
        dtype, shape = header_from_proto(item.embedding)
        items.append(
            MediaItem(
                index=index,
                modality=MODALITY_FROM_PROTO[item.modality],
                key=parse_key(item.key),
                dtype=dtype,
                shape=shape,
                encoder_fingerprint=item.encoder_fingerprint,
            )
        )
    return items


def request_from_proto(
    start: llm_pb2.GenerateTokensStart, facts: ModelFacts, max_draft_tokens: int
) -> Request:
    """Raises InvalidRequest for ids, spans or sampling out of range."""
    for name in ("prompt_ids", "prior_output_ids"):
        _check_ids(getattr(start, name), facts.vocab_size, name)
    speculation = start.speculation
    is_wanted = speculation.enabled if speculation.HasField("enabled") else True
    if speculation.HasField("max_draft_tokens"):
        max_draft_tokens = min(max_draft_tokens, speculation.max_draft_tokens)
    return Request(
        request_id=logs.request_id(),
        token_ids=[*start.prompt_ids, *start.prior_output_ids],
        num_prompt_tokens=len(start.prompt_ids),
        params=sampling_from_proto(start, facts.vocab_size),
        priority=start.priority,
        max_draft_tokens=max_draft_tokens if is_wanted else 0,
        spans=tuple(
            Span(span.item_index, span.prompt_offset, span.length, span.row_offset)
            for span in start.spans
        ),
        pending_items=set(range(len(start.items))),
        item_keys=tuple(item.key for item in start.items),
        cache_salt=start.cache_salt,
        use_prefix_cache=start.cache.prefix if start.cache.HasField("prefix") else True,
    )


def sampling_from_proto(start: llm_pb2.GenerateTokensStart, vocab_size: int) -> SamplingParams:
    """Raises InvalidRequest, naming the field, for a value out of range."""
    sampling = start.sampling
    for name in ("stop_token_ids", "banned_token_ids", "logit_bias"):
        _check_ids(getattr(sampling, name), vocab_size, f"sampling.{name}")
    for word in sampling.bad_words:
        _check_ids(word.ids, vocab_size, "sampling.bad_words")
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k or None,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        stop_ids=frozenset(() if sampling.ignore_stop else sampling.stop_token_ids),
        banned_ids=frozenset(sampling.banned_token_ids),
        bad_words=tuple(tuple(word.ids) for word in sampling.bad_words),
        seed=sampling.seed,
        choice=start.choice_index,
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
    )


def tokens_to_proto(progress: Progress) -> llm_pb2.GeneratedTokens:
    return llm_pb2.GeneratedTokens(
        ids=[sampled.token_id for sampled in progress.tokens],
        first_index=progress.first_index,
        logprobs=[_logprobs_to_proto(sampled) for sampled in progress.tokens if sampled.logprobs],
    )


def finished_to_proto(request: Request, reason: FinishReason) -> llm_pb2.GenerationFinished:
    timing, last = request.timing, request.token_ids[-1]
    is_stop_id = last in request.params.stop_ids
    return llm_pb2.GenerationFinished(
        reason=_FINISH_REASONS[reason],
        stop_token_id=last if reason is FinishReason.STOP and is_stop_id else None,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_found_tokens,
        completion_tokens=request.num_output_tokens,
        drafted=request.num_drafted,
        accepted=request.num_accepted,
        queue_ms=1000 * timing.queue_s,
        prefill_ms=1000 * timing.prefill_s,
        first_token_ms=1000 * timing.first_token_s,
    )


def _logprobs_to_proto(sampled: Sampled) -> llm_pb2.TokenLogprobs:
    assert sampled.logprobs is not None
    return llm_pb2.TokenLogprobs(
        logprob=sampled.logprobs.logprob,
        top_ids=sampled.logprobs.top_ids,
        top_logprobs=sampled.logprobs.top_logprobs,
    )


def _item_error(item: MediaItem, failed: llm_pb2.ItemFailed) -> MimoError:
    """What became of an item elsewhere ends the request here, for the same reason."""
    reason = Reason.__members__.get(failed.reason, Reason.INTERNAL)
    kind = _ERRORS.get(reason, InvalidRequest)
    message = failed.message or f"item {item.index} could not be encoded"
    return kind(message, reason=reason, item_index=item.index)


def _check_ids(ids: Any, vocab_size: int, field: str) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(f"an id is beyond the vocabulary of {vocab_size}", field=field)
