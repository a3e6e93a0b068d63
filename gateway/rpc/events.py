"""From generation events to the public protobuf messages. Pure."""

from collections.abc import Mapping

from gateway.catalog import ModelCard
from gateway.generation import (
    ChoiceFinished,
    Delta,
    Event,
    FinishReason,
    ItemReady,
    ItemReport,
    PromptUsage,
    StageTimings,
    Started,
    Summary,
    TextKind,
    TokenLogprob,
)
from mimo.store.wire import MODALITY_TO_PROTO, OUTCOME_TO_PROTO
from mimo.v1 import encoding_pb2, gateway_pb2

_REASONS = {
    FinishReason.STOP: gateway_pb2.CHOICE_FINISH_REASON_STOP,
    FinishReason.LENGTH: gateway_pb2.CHOICE_FINISH_REASON_LENGTH,
}


def event_to_proto(
    event: Event, seq: int, model: str, *, with_reasoning: bool
) -> gateway_pb2.GenerateResponse | None:
    """One response, or None for reasoning that the caller does not want."""
    match event:
        case Started(request_id, prompt):
            started = gateway_pb2.GenerateStarted(
                request_id=request_id, model=model, prompt=prompt_to_proto(prompt)
            )
            return gateway_pb2.GenerateResponse(seq=seq, started=started)
        case ItemReady(item):
            ready = gateway_pb2.MediaReady(item=item_to_proto(item))
            return gateway_pb2.GenerateResponse(seq=seq, media_ready=ready)
        case Delta(_, kind) if kind is TextKind.REASONING and not with_reasoning:
            return None
        case Delta():
            return gateway_pb2.GenerateResponse(seq=seq, delta=_delta_to_proto(event))
        case ChoiceFinished():
            finished = _finished_to_proto(event)
            return gateway_pb2.GenerateResponse(seq=seq, choice_finished=finished)
        case Summary():
            return gateway_pb2.GenerateResponse(seq=seq, summary=_summary_to_proto(event))


def prompt_to_proto(prompt: PromptUsage) -> gateway_pb2.PromptUsage:
    return gateway_pb2.PromptUsage(
        text_tokens=prompt.text_tokens,
        image_tokens=prompt.image_tokens,
        video_tokens=prompt.video_tokens,
        audio_tokens=prompt.audio_tokens,
        cached_tokens=prompt.cached_tokens,
        prompt_tokens=prompt.prompt_tokens,
    )


def item_to_proto(item: ItemReport) -> gateway_pb2.MediaReport:
    unknown = encoding_pb2.CACHE_OUTCOME_UNSPECIFIED
    cache = OUTCOME_TO_PROTO[item.cache] if item.cache else unknown
    return gateway_pb2.MediaReport(
        index=item.index,
        modality=MODALITY_TO_PROTO[item.modality],
        tokens=item.tokens,
        cache=cache,
        encode_ms=item.encode_ms,
        bytes=item.bytes,
    )


def model_to_proto(card: ModelCard, fingerprints: Mapping[str, str]) -> gateway_pb2.Model:
    """``fingerprints`` are those of the components that can be reached."""
    return gateway_pb2.Model(
        name=card.name,
        max_context_tokens=card.max_context_tokens,
        inputs=[MODALITY_TO_PROTO[modality] for modality in card.inputs],
        fingerprints=fingerprints,
        created=card.created,
    )


def _delta_to_proto(delta: Delta) -> gateway_pb2.Delta:
    message = gateway_pb2.Delta(
        choice_index=delta.choice_index,
        logprobs=map(_logprob_to_proto, delta.logprobs),
        token_ids=delta.token_ids,
    )
    if delta.kind is TextKind.CONTENT:
        message.content = delta.text
    else:
        message.reasoning = delta.text
    return message


def _logprob_to_proto(entry: TokenLogprob) -> gateway_pb2.TokenLogprob:
    return gateway_pb2.TokenLogprob(
        token_id=entry.token_id,
        token=entry.token,
        logprob=entry.logprob,
        top=[
            gateway_pb2.TopLogprob(token_id=top.token_id, token=top.token, logprob=top.logprob)
            for top in entry.top
        ],
    )


def _finished_to_proto(finished: ChoiceFinished) -> gateway_pb2.ChoiceFinished:
    message = gateway_pb2.ChoiceFinished(
        choice_index=finished.choice_index, reason=_REASONS[finished.reason]
    )
    if finished.stop_string is not None:
        message.stop_string = finished.stop_string
    elif finished.stop_token_id is not None:
        message.stop_token_id = finished.stop_token_id
    return message


def _summary_to_proto(summary: Summary) -> gateway_pb2.GenerateSummary:
    return gateway_pb2.GenerateSummary(
        prompt=prompt_to_proto(summary.prompt),
        completion_tokens=summary.completion_tokens,
        reasoning_tokens=summary.reasoning_tokens,
        timings=_timings_to_proto(summary.timings_ms),
        items=map(item_to_proto, summary.items),
        speculation=gateway_pb2.SpeculationReport(
            drafted=summary.speculation.drafted, accepted=summary.speculation.accepted
        ),
        model_fingerprint=summary.model_fingerprint,
    )


def _timings_to_proto(timings: StageTimings) -> gateway_pb2.StageTimings:
    return gateway_pb2.StageTimings(
        queue_ms=timings.queue,
        fetch_ms=timings.fetch,
        decode_media_ms=timings.decode_media,
        encode_ms=timings.encode,
        store_ms=timings.store,
        prefill_ms=timings.prefill,
        first_token_ms=timings.first_token,
        total_ms=timings.total,
    )
