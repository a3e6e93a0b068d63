"""What is asked: prompts of so many tokens, with media or without, the same for the same seed."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mimo.cli.client import Attachment, Turn
from mimo.errors import ConfigError

WorkloadName = Literal["text", "image", "audio", "video", "mixed"]
MODALITIES = ("image", "audio", "video")
KINDS = ("text", *MODALITIES)

# One token each in the vocabularies of the published models and of the bundled one.
OPENING = "The"
WORDS = (
    *("the", "is", "are", "in", "of", "to", "at", "you", "see", "hear", "what", "how", "many"),
    *("image", "picture", "video", "sound", "text", "letters", "two", "three", "red", "green"),
    *("blue", "circle", "left", "right", "up", "down", "from", "answer", "small", "day", "name"),
)


@dataclass(frozen=True)
class Call:
    """One request. ``options`` are those of a ChatClient."""

    kind: str
    turns: tuple[Turn, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Makes the call of any number. Raises ConfigError when media cannot be made here.

    ``input_tokens``: words of text in a prompt, ``prefix_tokens`` of which are the same in every
    prompt; the chat template and media come on top. ``output_tokens`` are generated whatever the
    model would like. Call ``n`` of a kind carries medium ``n`` modulo ``distinct_media``. Nothing
    that another ``salt`` left in a cache is found.
    """

    name: WorkloadName
    input_tokens: int
    output_tokens: int
    distinct_media: int
    seed: int
    salt: str
    prefix_tokens: int = 0
    image_side: int = 224
    audio_seconds: float = 2.0
    video_seconds: float = 2.0
    max_draft_tokens: int | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return KINDS if self.name == "mixed" else (self.name,)

    @property
    def has_media(self) -> bool:
        return self.name != "text"

    def make_media(self) -> dict[tuple[str, int], Attachment]:
        """All media of the load by kind and index: made before the clock starts."""
        kinds = [kind for kind in self.kinds if kind in MODALITIES]
        return {
            (kind, index): self._medium(kind, index)
            for kind in kinds
            for index in range(self.distinct_media)
        }

    def call(self, number: int, media: Mapping[tuple[str, int], Attachment]) -> Call:
        """Kinds take turns. ``media`` is what :meth:`make_media` returned."""
        kind = self.kinds[number % len(self.kinds)]
        round_number = number // len(self.kinds)
        attachments: tuple[Attachment, ...] = ()
        if kind in MODALITIES:
            attachments = (media[kind, round_number % self.distinct_media],)
        options: dict[str, Any] = {
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "return_token_ids": True,
            "cache_salt": self.salt,
        }
        if self.max_draft_tokens is not None:
            options["speculation"] = {
                "enabled": self.max_draft_tokens > 0,
                "max_draft_tokens": self.max_draft_tokens,
            }
        return Call(kind, (Turn("user", self._text(number), attachments),), options)

    def _text(self, number: int) -> str:
        num_shared = min(self.prefix_tokens, self.input_tokens) - 1
        shared = random.Random(f"{self.seed} prefix").choices(WORDS, k=max(num_shared, 0))
        own = random.Random(f"{self.seed} {number}").choices(
            WORDS, k=self.input_tokens - 1 - len(shared)
        )
        return " ".join([OPENING, *shared, *own])

    def _medium(self, kind: str, index: int) -> Attachment:
        try:
            from mimo.cli.load import media
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--workload {self.name} makes media with {error.name}: "
                "pip install 'mimo-serve[gateway]'"
            ) from None
        seed = self.seed * 1_000_003 + index
        match kind:
            case "image":
                return Attachment(kind, f"{index}.png", media.picture(seed, self.image_side))
            case "audio":
                return Attachment(kind, f"{index}.wav", media.sound(seed, self.audio_seconds))
            case _:
                clip = media.video(seed, self.image_side, self.video_seconds)
                return Attachment(kind, f"{index}.mp4", clip)
