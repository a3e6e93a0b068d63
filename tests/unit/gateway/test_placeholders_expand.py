"""Placeholders: ids, items and spans against tables worked out by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.conversation import Conversation, Message, Role, TextPart
from gateway.generation import PromptUsage
from gateway.items import (
    AudioPlan,
    ImagePlan,
    MediaPart,
    Modality,
    PlannedMedia,
    ResizedBy,
    VideoPlan,
)
from gateway.model import Model
from gateway.prompt.placeholders import ExpandedPrompt, PromptItem, Span, expand
from gateway.prompt.segments import Media, Text
from tests.support import byte_model as ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = tmp_path_factory.mktemp("model")
    return Model.open(ids.write(directory))


def image(num_tokens: int) -> PlannedMedia:
    plan = ImagePlan(
        32, 32 * num_tokens, 32, 32 * num_tokens, 1, (1, 2, 2 * num_tokens), num_tokens
    )
    return PlannedMedia(Modality.IMAGE, plan, "png", 10, "00")


def audio_plan(num_tokens: int) -> AudioPlan:
    num_mel_frames = 16 * num_tokens
    return AudioPlan(0, 24000, 1, 24000, 240 * num_mel_frames - 1, num_mel_frames, num_tokens)


def audio(num_tokens: int) -> PlannedMedia:
    return PlannedMedia(Modality.AUDIO, audio_plan(num_tokens), "wav", 10, "00")


def video(
    labels: tuple[str, ...],
    *,
    tokens_per_grid: int = 4,
    groups: tuple[tuple[int, int], ...] | None = None,
    sound_tokens: int = 0,
    sound_segments: tuple[tuple[int, int], ...] = (),
) -> PlannedMedia:
    plan = VideoPlan(
        stream_index=0,
        source_height=64,
        source_width=64,
        target_height=64,
        target_width=64,
        orientation=1,
        num_source_frames=100,
        frame_indices=tuple(range(2 * len(labels))),
        timestamps=tuple(float(i) for i in range(2 * len(labels))),
        grid_thw=(len(labels), 4, 4),
        tokens_per_grid=tokens_per_grid,
        labels=labels,
        groups=groups or tuple((i, i + 1) for i in range(len(labels))),
        resized_by=ResizedBy.ENCODER,
        sound=audio_plan(sound_tokens) if sound_tokens else None,
        sound_segments=sound_segments,
    )
    return PlannedMedia(Modality.VIDEO, plan, "mp4", 10, "00")


def part(modality: Modality) -> MediaPart:
    return MediaPart(modality, b"")


def expand_media(model: Model, *media: PlannedMedia) -> ExpandedPrompt:
    segments = [Media(index) for index in range(len(media))]
    return expand(segments, media, model.tokenizer, model.media_token_ids)


def test_three_images_a_sound_and_a_video_with_sound(model: Model) -> None:
    # The video has two grids of 4 tokens, at 0 s and 2 s, and ends at 4 s. Sound has 6.25 tokens a
    # second: grid 0 owns rows int(0 * 6.25) = 0 up to int(2 * 6.25) = 12, grid 1 rows 12 up to
    # min(int(4 * 6.25) = 25, 20): the track is 20 tokens long.
    media = [
        image(2),
        image(1),
        image(3),
        audio(2),
        video(("00:00", "00:02"), sound_tokens=20, sound_segments=((0, 12), (12, 8))),
    ]
    message = Message(
        Role.USER,
        (
            TextPart("Look: "),
            part(Modality.IMAGE),
            part(Modality.IMAGE),
            TextPart("and"),
            part(Modality.IMAGE),
            part(Modality.AUDIO),
            TextPart("ab"),
            part(Modality.VIDEO),
        ),
    )
    rendered = model.template.render(Conversation((message,)))

    prompt = expand(rendered.segments, media, model.tokenizer, model.media_token_ids)

    assert prompt.ids == (
        ids.IM_START,  # 0
        *b"user\nLook: ",  # 1..11: the role and the text are one run
        *(ids.VISION_START, ids.IMAGE_PAD, ids.IMAGE_PAD, ids.VISION_END),  # 12..15
        *(ids.VISION_START, ids.IMAGE_PAD, ids.VISION_END),  # 16..18
        *b"and",  # 19..21
        *(ids.VISION_START, ids.IMAGE_PAD, ids.IMAGE_PAD, ids.IMAGE_PAD, ids.VISION_END),  # 22..26
        *(ids.AUDIO_START, ids.AUDIO_PAD, ids.AUDIO_PAD, ids.AUDIO_END),  # 27..30
        ids.AB,  # 31
        ids.VIDEO_START,  # 32
        *b"00:00",  # 33..37
        *(ids.VISION_START, *[ids.VIDEO_PAD] * 4, ids.VISION_END),  # 38..43
        *(ids.AUDIO_START, *[ids.AUDIO_PAD] * 12, ids.AUDIO_END),  # 44..57
        *b"00:02",  # 58..62
        *(ids.VISION_START, *[ids.VIDEO_PAD] * 4, ids.VISION_END),  # 63..68
        *(ids.AUDIO_START, *[ids.AUDIO_PAD] * 8, ids.AUDIO_END),  # 69..78
        ids.VIDEO_END,  # 79
        ids.IM_END,  # 80
        ids.IM_START,  # 81
        *b"assistant\n",  # 82..91
        *(ids.THINK, ids.END_THINK),  # 92..93
    )
    assert prompt.items == (
        PromptItem(0, Modality.IMAGE, 2),
        PromptItem(1, Modality.IMAGE, 1),
        PromptItem(2, Modality.IMAGE, 3),
        PromptItem(3, Modality.AUDIO, 2),
        PromptItem(4, Modality.VIDEO, 8),
        PromptItem(4, Modality.AUDIO, 20, is_sound_track=True),
    )
    assert prompt.spans == (
        Span(0, 13, 2, 0),
        Span(1, 17, 1, 0),
        Span(2, 23, 3, 0),
        Span(3, 28, 2, 0),
        Span(4, 39, 4, 0),
        Span(5, 45, 12, 0),
        Span(4, 64, 4, 4),
        Span(5, 70, 8, 12),
    )
    # 2 + 1 + 3 picture pads, 8 video pads, 2 + 12 + 8 sound pads; 94 - 36 = 58 of text.
    assert prompt.usage == PromptUsage(58, 6, 8, 22)
    assert prompt.usage.prompt_tokens == len(prompt.ids) == 94


def test_sound_shorter_than_the_picture_leaves_later_grids_silent(model: Model) -> None:
    clip = video(
        ("00:00", "00:02", "00:04"), sound_tokens=15, sound_segments=((0, 12), (12, 3), (25, 0))
    )

    prompt = expand_media(model, clip)

    # 0 video_start, 1..5 label, 6..11 grid 0, 12..25 sound 0 (pads 13..24), 26..30 label,
    # 31..36 grid 1, 37..41 sound 1 (pads 38..40), 42..46 label, 47..52 grid 2, 53 video_end
    assert prompt.spans == (
        Span(0, 7, 4, 0),
        Span(1, 13, 12, 0),
        Span(0, 32, 4, 4),
        Span(1, 38, 3, 12),
        Span(0, 48, 4, 8),
    )
    assert prompt.ids[42:] == (
        *b"00:04",
        ids.VISION_START,
        *[ids.VIDEO_PAD] * 4,
        ids.VISION_END,
        ids.VIDEO_END,
    )


def test_sound_longer_than_the_picture_is_covered_partly(model: Model) -> None:
    clip = video(("00:00", "00:02"), sound_tokens=80, sound_segments=((0, 12), (12, 13)))

    prompt = expand_media(model, clip)

    assert prompt.items[1].num_rows == 80
    assert prompt.usage.audio_tokens == 25


def test_sound_without_any_row_in_the_prompt_is_no_item(model: Model) -> None:
    clip = video(("00:00",), sound_tokens=1, sound_segments=((0, 0),))

    prompt = expand_media(model, clip)

    assert prompt.items == (PromptItem(0, Modality.VIDEO, 4),)
    assert ids.AUDIO_START not in prompt.ids


def test_silent_video_has_a_label_and_a_span_for_each_grid(model: Model) -> None:
    prompt = expand_media(model, video(("00:00", "01:40"), tokens_per_grid=2))

    assert prompt.ids == (
        ids.VIDEO_START,
        *b"00:00",
        *(ids.VISION_START, ids.VIDEO_PAD, ids.VIDEO_PAD, ids.VISION_END),
        *b"01:40",
        *(ids.VISION_START, ids.VIDEO_PAD, ids.VIDEO_PAD, ids.VISION_END),
        ids.VIDEO_END,
    )
    assert prompt.spans == (Span(0, 7, 2, 0), Span(0, 16, 2, 2))


def test_a_group_has_one_label_and_its_sound_together(model: Model) -> None:
    clip = video(
        ("00:00", "00:02", "00:04"),
        tokens_per_grid=1,
        groups=((0, 2), (2, 3)),
        sound_tokens=37,
        sound_segments=((0, 12), (12, 13), (25, 12)),
    )

    prompt = expand_media(model, clip)

    grid = (ids.VISION_START, ids.VIDEO_PAD, ids.VISION_END)
    assert prompt.ids == (
        ids.VIDEO_START,
        *(*b"00:00", *grid, *grid, ids.AUDIO_START, *[ids.AUDIO_PAD] * 25, ids.AUDIO_END),
        *(*b"00:04", *grid, ids.AUDIO_START, *[ids.AUDIO_PAD] * 12, ids.AUDIO_END),
        ids.VIDEO_END,
    )
    # The sound of the first two grids is one run of rows and so one span.
    assert prompt.spans == (
        Span(0, 7, 1, 0),
        Span(0, 10, 1, 1),
        Span(1, 13, 25, 0),
        Span(0, 45, 1, 2),
        Span(1, 48, 12, 25),
    )


def test_rows_with_a_gap_are_two_spans(model: Model) -> None:
    clip = video(
        ("00:00", "00:02"),
        groups=((0, 2),),
        sound_tokens=20,
        sound_segments=((0, 3), (5, 4)),
    )

    prompt = expand_media(model, clip)

    assert prompt.spans[-2:] == (Span(1, 19, 3, 0), Span(1, 22, 4, 5))


def test_same_medium_twice_is_two_items(model: Model) -> None:
    segments = [Media(0), Text("x"), Media(1)]
    prompt = expand(segments, [image(1), image(1)], model.tokenizer, model.media_token_ids)

    assert [item.media_index for item in prompt.items] == [0, 1]
    assert prompt.spans == (Span(0, 1, 1, 0), Span(1, 5, 1, 0))


def test_pads_match_rows_of_every_fully_covered_item(model: Model) -> None:
    media = [image(5), audio(7), video(("00:00", "00:01", "00:02"))]
    prompt = expand_media(model, *media)

    for index, item in enumerate(prompt.items):
        spans = [span for span in prompt.spans if span.item_index == index]
        rows = [
            row for span in spans for row in range(span.row_offset, span.row_offset + span.length)
        ]
        assert rows == list(range(item.num_rows))


def test_a_long_text_only_prompt_has_no_items(model: Model) -> None:
    prompt = expand([Text("ab" * 3)], [], model.tokenizer, None)

    assert prompt == ExpandedPrompt((ids.AB,) * 3, (), (), PromptUsage(text_tokens=3))
    assert replace(prompt.usage, cached_tokens=2).prompt_tokens == 3
