"""Conversations to learn from and to be measured on, as token ids.

Prompts are made by the gateway's own template, tokenizer and placeholder expansion, from plans of
the gateway's own planner, so that the model is trained on exactly what it will be served.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.conversation import Conversation, Message, Part, Role, TextPart
from gateway.items import AudioPlan, ImagePlan, MediaPart, Modality, PlannedMedia
from gateway.prompt.placeholders import PromptItem, Span, expand
from gateway.prompt.template import ChatTemplate, TemplateSettings
from gateway.prompt.tokenizer import Tokenizer
from models import tokenizer as vocabulary
from models.training.corpus import HELD_OUT, TRAIN, UNSEEN, processor_config
from models.training.draw import pick, stream
from models.training.skills import Medium, Skills, Turn

_MULTI_TURN, _SYSTEM, _TEXT_FIRST, _CASUAL = 0.07, 0.05, 0.2, 0.2  # shares of training examples
_SYSTEM_TEXTS = ("You are a helpful assistant.", "Answer in one sentence.")


@dataclass(frozen=True, slots=True)
class Item:
    """A sample that an encoder makes rows of."""

    name: str
    split: str
    index: int

    @property
    def is_sound(self) -> bool:
        return self.name == "sounds"


@dataclass(frozen=True, slots=True)
class Example:
    """``ids`` end with the answer and its end of turn; the answer begins at ``start``."""

    turn: Turn
    ids: tuple[int, ...]
    start: int
    items: tuple[Item, ...]
    spans: tuple[Span, ...]


class Examples:
    """Draws turns and renders them."""

    def __init__(self, skills: Skills) -> None:
        self._skills = skills
        self._tokens = processor_config().token_ids
        self._tokenizer = Tokenizer(vocabulary.build().to_str())
        settings = TemplateSettings.from_tokenizer_config(
            vocabulary.tokenizer_config(), multimodal=True
        )
        self._template = ChatTemplate(settings, self._tokenizer)
        self._end = self._tokenizer.control_id("<|im_end|>")

    def train(self, rng: random.Random, mix: Mapping[str, float]) -> Example:
        """A training example of a skill that ``mix`` picks; some have an earlier turn, a system
        text, the question before the media, or a question written carelessly."""
        turns = [self._skills.turn(rng, pick(rng, mix), TRAIN)]
        if rng.random() < _MULTI_TURN:
            turns.insert(0, self._skills.turn(rng, pick(rng, mix), TRAIN))
        messages = []
        if rng.random() < _SYSTEM:
            messages.append(Message(Role.SYSTEM, (TextPart(rng.choice(_SYSTEM_TEXTS)),)))
        for turn in turns:
            question = turn.exchange.question
            if rng.random() < _CASUAL:
                question = _carelessly(question)
            messages += _messages(turn, question, text_first=rng.random() < _TEXT_FIRST)
        return self._render(turns, messages)

    def held_out(self, skill: str, index: int, *, unseen: bool = False) -> Example:
        """Held-out example ``index`` of a skill: one turn, media first, the same in every run.

        ``unseen`` takes fonts and voices that were never trained on.
        """
        split = UNSEEN if unseen else HELD_OUT
        turn = self._skills.turn(stream("held out", skill, split, index), skill, split)
        return self._render([turn], _messages(turn, turn.exchange.question, text_first=False))

    def spell(self, ids: Sequence[int]) -> str:
        """Ids as text, control tokens included."""
        return b"".join(map(self._tokenizer.spelling, ids)).decode(errors="replace")

    @property
    def pad_ids(self) -> tuple[int, ...]:
        """The placeholders of the encoders' rows."""
        return self._tokens.image_pad, self._tokens.video_pad, self._tokens.audio_pad

    def _render(self, turns: Sequence[Turn], messages: Sequence[Message]) -> Example:
        """``messages`` end with the answer to learn."""
        media = [medium for turn in turns for medium in turn.media]
        rendered = self._template.render(Conversation(tuple(messages[:-1])))
        prompt = expand(rendered.segments, _planned(media), self._tokenizer, self._tokens)
        answer = self._tokenizer.encode(messages[-1].text)
        return Example(
            turn=turns[-1],
            ids=(*prompt.ids, *answer, self._end),
            start=len(prompt.ids),
            items=tuple(_item(media[item.media_index], item) for item in prompt.items),
            spans=prompt.spans,
        )


def _messages(turn: Turn, question: str, *, text_first: bool) -> list[Message]:
    """A question with its media, and the answer."""
    parts: list[Part] = [MediaPart(None, b"") for _ in turn.media]
    parts.insert(0 if text_first else len(parts), TextPart(question))
    answer = TextPart(turn.exchange.answer)
    return [Message(Role.USER, tuple(parts)), Message(Role.ASSISTANT, (answer,))]


def _carelessly(question: str) -> str:
    """As people type: a small first letter, no mark at the end. Strings stay as they are."""
    first, rest = question[0], question[1:]
    is_word = rest[:1].islower()
    question = first.lower() + rest if is_word else question
    return question.rstrip("?.!") if is_word else question


def _planned(media: Sequence[Medium]) -> list[PlannedMedia]:
    """Plans as the gateway holds them; what names the content is not needed to make a prompt."""
    planned = []
    for medium in media:
        match medium.plan:
            case ImagePlan():
                modality = Modality.IMAGE
            case AudioPlan():
                modality = Modality.AUDIO
            case _:
                modality = Modality.VIDEO
        planned.append(PlannedMedia(modality, medium.plan, "", 0, ""))
    return planned


def _item(medium: Medium, item: PromptItem) -> Item:
    if item.is_sound_track:
        assert medium.sound is not None
        medium = medium.sound
    return Item(medium.name, medium.split, medium.index)
