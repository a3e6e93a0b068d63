"""Generation events as ``chat.completion.chunk`` objects, in the order clients can digest. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.api.answer import (
    AnswerHead,
    Json,
    Shown,
    logprob_object,
    logprobs_object,
    mimo_object,
    reasoning_fields,
    stop_field,
    system_fingerprint,
    usage_object,
)
from gateway.generation import ChoiceFinished, Delta, Event, ItemReady, Started, Summary, TextKind


@dataclass(slots=True)
class _Withheld:
    """What belongs to a choice and waits for its next chunk."""

    logprobs: list[Json] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class ChunkBuilder:
    """Nothing until the decoder works; then the roles, once per choice and in index order; never a
    delta without text; one finish chunk per choice; last what sums up, on a chunk of its own when
    usage was asked for and on the last finish chunk when not."""

    def __init__(self, head: AnswerHead, num_choices: int, shown: Shown) -> None:
        self._head = head
        self._shown = shown
        self._withheld = [_Withheld() for _ in range(num_choices)]
        self._began = False
        self._last: Json | None = None  # the latest finish chunk, until something follows it

    def chunks(self, event: Event) -> Iterator[Json]:
        match event:
            case Started() | ItemReady():
                return
            case Summary():
                yield from self._sum_up(event)
                return
        yield from self._release()
        if not self._began:
            self._began = True
            for index in range(len(self._withheld)):
                yield self._choice(index, {"role": "assistant", "content": ""})
        match event:
            case Delta():
                yield from self._delta(event)
            case ChoiceFinished(index, reason):
                finish = self._choice(index, {}, reason.value)
                finish["choices"][0] |= stop_field(event)
                self._last = finish

    def _delta(self, event: Delta) -> Iterator[Json]:
        withheld = self._withheld[event.choice_index]
        withheld.logprobs += map(logprob_object, event.logprobs)
        withheld.token_ids += event.token_ids
        if event.text and event.kind is TextKind.CONTENT:
            yield self._choice(event.choice_index, {"content": event.text})
        elif event.text and self._shown.reasoning:
            yield self._choice(event.choice_index, reasoning_fields(event.text))

    def _choice(self, index: int, delta: Json, finish: str | None = None) -> Json:
        """A chunk of one choice, with everything that waited for it."""
        withheld, self._withheld[index] = self._withheld[index], _Withheld()
        logprobs = logprobs_object(withheld.logprobs) if withheld.logprobs else None
        choice: Json = {"index": index, "delta": delta, "finish_reason": finish}
        choice["logprobs"] = logprobs
        if withheld.token_ids:
            choice["token_ids"] = withheld.token_ids
        return self._chunk([choice])

    def _sum_up(self, summary: Summary) -> Iterator[Json]:
        report = {
            "system_fingerprint": system_fingerprint(summary),
            "mimo": mimo_object(summary, self._head.request_id),
        }
        if self._shown.stream_usage:
            yield from self._release()
            yield self._chunk([]) | report | {"usage": usage_object(summary)}
        elif self._last is not None:
            self._last |= report
            yield from self._release()

    def _release(self) -> Iterator[Json]:
        if self._last is not None:
            yield self._last
            self._last = None

    def _chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {
            "id": self._head.id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }
        return chunk | {"usage": None} if self._shown.stream_usage else chunk
