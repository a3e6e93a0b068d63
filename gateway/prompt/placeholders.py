"""Media in a prompt: control tokens around pads, one pad for each embedding row.

* picture   vision_start, image_pad x rows, vision_end
* sound     audio_start, audio_pad x rows, audio_end
* video     video_start, then for each group of grids: the "MM:SS" label of the first grid as
            ordinary text; for each grid vision_start, video_pad x rows, vision_end; the group's
            sound, if it has any, as above; finally video_end

A medium is one item, and a video's sound track is an item of its own. Spans say which rows of which
item replace the pads at which positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.generation import PromptUsage
from gateway.items import AudioPlan, ImagePlan, MediaTokenIds, Modality, PlannedMedia, VideoPlan
from gateway.prompt.segments import Control, Segment, Text
from gateway.prompt.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptItem:
    """An embedding of ``num_rows`` rows, made of medium ``media_index`` or of its sound track."""

    media_index: int
    modality: Modality
    num_rows: int
    is_sound_track: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``row_offset`` and on of an item replace ``length`` pads from ``prompt_offset`` on."""

    item_index: int
    prompt_offset: int
    length: int
    row_offset: int


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    ids: tuple[int, ...]
    items: tuple[PromptItem, ...]
    spans: tuple[Span, ...]
    usage: PromptUsage


def expand(
    segments: Sequence[Segment],
    media: Sequence[PlannedMedia],
    tokenizer: Tokenizer,
    tokens: MediaTokenIds | None,
) -> ExpandedPrompt:
    """Encode a rendered prompt. ``tokens`` is None for a model that takes text only.

    Items are numbered in prompt order, a video before its sound.
    """
    expansion = _Expansion(tokenizer)
    for segment in segments:
        match segment:
            case Control(id):
                expansion.ids.append(id)
            case Text(text):
                expansion.ids += tokenizer.encode(text)
            case _:
                if tokens is None:
                    raise ValueError("media in a prompt of a text-only model")
                expansion.add_media(segment.index, media[segment.index], tokens)
    return expansion.finish()


class _Expansion:
    """A prompt in the making."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._items: list[PromptItem] = []
        self._spans: list[Span] = []

    def finish(self) -> ExpandedPrompt:
        pads = dict.fromkeys(Modality, 0)
        for span in self._spans:
            pads[self._items[span.item_index].modality] += span.length
        usage = PromptUsage(
            text_tokens=len(self.ids) - sum(pads.values()),
            image_tokens=pads[Modality.IMAGE],
            video_tokens=pads[Modality.VIDEO],
            audio_tokens=pads[Modality.AUDIO],
        )
        return ExpandedPrompt(tuple(self.ids), tuple(self._items), tuple(self._spans), usage)

    def add_media(self, index: int, medium: PlannedMedia, tokens: MediaTokenIds) -> None:
        match medium.plan:
            case ImagePlan(num_tokens=rows):
                item = self._add_item(PromptItem(index, Modality.IMAGE, rows))
                self.ids.append(tokens.vision_start)
                self._add_span(item, tokens.image_pad, rows, 0)
                self.ids.append(tokens.vision_end)
            case AudioPlan(num_tokens=rows):
                item = self._add_item(PromptItem(index, Modality.AUDIO, rows))
                self.ids.append(tokens.audio_start)
                self._add_span(item, tokens.audio_pad, rows, 0)
                self.ids.append(tokens.audio_end)
            case VideoPlan() as plan:
                self._add_video(index, plan, tokens)

    def _add_video(self, index: int, plan: VideoPlan, tokens: MediaTokenIds) -> None:
        frames = self._add_item(PromptItem(index, Modality.VIDEO, plan.num_tokens))
        sound = -1
        if plan.sound is not None and plan.num_sound_tokens:
            # All rows of the track are encoded, whether or not the prompt uses them all.
            track = PromptItem(index, Modality.AUDIO, plan.sound.num_tokens, is_sound_track=True)
            sound = self._add_item(track)
        rows = plan.tokens_per_grid
        self.ids.append(tokens.video_start)
        for first, stop in plan.groups:
            # A label is encoded by itself: control tokens stand on both sides of it.
            self.ids += self._tokenizer.encode(plan.labels[first])
            for grid in range(first, stop):
                self.ids.append(tokens.vision_start)
                self._add_span(frames, tokens.video_pad, rows, grid * rows)
                self.ids.append(tokens.vision_end)
            segments = [segment for segment in plan.sound_segments[first:stop] if segment[1]]
            if segments:
                self.ids.append(tokens.audio_start)
                for row, count in _join(segments):
                    self._add_span(sound, tokens.audio_pad, count, row)
                self.ids.append(tokens.audio_end)
        self.ids.append(tokens.video_end)

    def _add_item(self, item: PromptItem) -> int:
        self._items.append(item)
        return len(self._items) - 1

    def _add_span(self, item: int, pad: int, length: int, row: int) -> None:
        self._spans.append(Span(item, len(self.ids), length, row))
        self.ids += [pad] * length


def _join(segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge (first row, count) runs that follow one another without a gap."""
    joined: list[tuple[int, int]] = []
    for row, count in segments:
        if joined and sum(joined[-1]) == row:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((row, count))
    return joined
