"""What a generation is asked for, and what happens while it runs.

The public faces translate their requests to :class:`GenerationRequest` and these events back; the
pipeline in between knows neither HTTP nor protobuf of the public API.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.conversation import Conversation
from gateway.items import Modality
from mimo.store.base import Outcome

# ── asked for ──


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """None means the model's default. ``temperature`` 0 is greedy, ``top_k`` 0 keeps all."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Speculation:
    """None means the decoder's default."""

    enabled: bool | None = None
    max_draft_tokens: int | None = None


class EmbeddingCache(StrEnum):
    USE = "use"
    BYPASS = "bypass"


@dataclass(frozen=True, slots=True)
class CachePolicy:
    prefix: bool = True
    embeddings: EmbeddingCache = EmbeddingCache.USE


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must look like, in the source text of its kind. ``field`` is the path of the
    request's field that asks for it."""

    kind: GrammarKind
    source: str
    field: str = "grammar"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One call of either public face, validated field by field.

    ``tenant_salt`` separates the caller's cache entries from all others'; ``timeout_s`` is what is
    left of the caller's deadline; ``top_logprobs`` None asks for none, 0 for the sampled token's.
    """

    request_id: str
    conversation: Conversation
    sampling: SamplingParams = SamplingParams()
    speculation: Speculation = Speculation()
    cache: CachePolicy = CachePolicy()
    grammar: Grammar | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None
    return_token_ids: bool = False
    priority: int = 0
    tenant_salt: bytes = b""
    timeout_s: float = 300.0


# ── happened ──


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """Prompt tokens by what they stand for. Labels and delimiters count as text, a video's sound
    as audio; the four add up to the prompt."""

    text_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0
    cached_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + self.image_tokens + self.video_tokens + self.audio_tokens


@dataclass(frozen=True, slots=True)
class ItemReport:
    """What became of one item. ``index`` counts the request's media parts: a video's sound is an
    item of its own with its video's index. ``bytes`` are those of the compressed media."""

    index: int
    modality: Modality
    tokens: int
    cache: Outcome | None = None  # None until it is known
    encode_ms: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """Planned and within limits; comes first, before any encoder has worked. A face that must
    commit to a status line waits for the next event other than :class:`ItemReady`."""

    request_id: str
    prompt: PromptUsage
    items: tuple[ItemReport, ...]


@dataclass(frozen=True, slots=True)
class ItemReady:
    """An item has its embedding."""

    item: ItemReport


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability under the raw logits. ``token`` may be part of a character."""

    token_id: int
    token: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()


class TextKind(StrEnum):
    CONTENT = "content"
    REASONING = "reasoning"


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. ``logprobs`` are those of the content tokens whose last byte is in
    it. ``token_ids``, when asked for, are all ids since the last delta, tags and end included; a
    final delta may hold ids and no text. ``num_tokens`` counts the tokens that it took."""

    choice_index: int
    kind: TextKind
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()
    num_tokens: int = field(default=0, compare=False)  # how it came about, not what it says

    def followed_by(self, more: "Delta") -> "Delta | None":
        """Both as one, when they are of one choice and kind."""
        if (more.choice_index, more.kind) != (self.choice_index, self.kind):
            return None
        return Delta(
            self.choice_index,
            self.kind,
            self.text + more.text,
            self.logprobs + more.logprobs,
            self.token_ids + more.token_ids,
            self.num_tokens + more.num_tokens,
        )


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    choice_index: int
    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class StageTimings:
    """Milliseconds per stage. Stages overlap, so they do not add up to ``total``."""

    queue: float = 0.0
    fetch: float = 0.0
    decode_media: float = 0.0
    encode: float = 0.0
    store: float = 0.0
    prefill: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """Draft tokens by position, over all choices."""

    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """Comes last. ``completion_tokens`` are sampled ids of all choices, reasoning, tags and the end
    included, up to the id that completed a stop string."""

    prompt: PromptUsage
    completion_tokens: int
    reasoning_tokens: int
    timings_ms: StageTimings
    items: tuple[ItemReport, ...]
    speculation: SpeculationReport
    model_fingerprint: str


Event = Started | ItemReady | Delta | ChoiceFinished | Summary


def joined(events: Sequence[Event]) -> Sequence[Event]:
    """The same events with neighbouring deltas made one: what a reader who is behind gets."""
    if len(events) < 2:
        return events
    fewer = [events[0]]
    for event in events[1:]:
        last = fewer[-1]
        both = None
        if isinstance(event, Delta) and isinstance(last, Delta):
            both = last.followed_by(event)
        if both is not None:
            fewer[-1] = both
        else:
            fewer.append(event)
    return fewer
