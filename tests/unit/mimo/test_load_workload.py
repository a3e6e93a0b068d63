"""What is asked: the same for the same seed, of the size that was asked for."""

import io
from dataclasses import replace

import av
import numpy as np
import pytest
from PIL import Image

from mimo.cli.load import media
from mimo.cli.load.workload import OPENING, WORDS, Workload
from models import tokenizer

TEXT = Workload(name="text", input_tokens=40, output_tokens=8, distinct_media=0, seed=5, salt="s")
MIXED = replace(TEXT, name="mixed", distinct_media=2, image_side=56, audio_seconds=0.25)


def text_of(workload: Workload, number: int) -> str:
    return workload.call(number, {}).turns[0].text


def test_a_prompt_has_as_many_tokens_as_asked_for() -> None:
    vocabulary = tokenizer.build()
    assert len(vocabulary.encode(OPENING).ids) == 1
    assert {len(vocabulary.encode(f" {word}").ids) for word in WORDS} == {1}
    for input_tokens in (1, 2, 40):
        text = text_of(replace(TEXT, input_tokens=input_tokens), 3)
        assert len(vocabulary.encode(text).ids) == input_tokens


def test_prompts_differ_by_number_and_seed_and_repeat_with_both() -> None:
    texts = [text_of(TEXT, number) for number in range(50)]
    assert len(set(texts)) == 50
    assert texts == [text_of(TEXT, number) for number in range(50)]
    assert text_of(replace(TEXT, seed=6), 0) not in texts


@pytest.mark.parametrize("prefix_tokens", [1, 30, 40, 99])
def test_prompts_share_their_beginning_and_nothing_else(prefix_tokens: int) -> None:
    workload = replace(TEXT, prefix_tokens=prefix_tokens)
    words = [text_of(workload, number).split() for number in range(20)]
    assert {len(prompt) for prompt in words} == {40}
    num_shared = min(prefix_tokens, 40)
    assert len({tuple(prompt[:num_shared]) for prompt in words}) == 1
    if num_shared < 40:
        assert len({prompt[num_shared] for prompt in words}) > 5


def test_kinds_take_turns_and_media_come_round() -> None:
    made = MIXED.make_media()
    assert sorted(made) == [(kind, n) for kind in ("audio", "image", "video") for n in (0, 1)]
    calls = [MIXED.call(number, made) for number in range(16)]
    assert [call.kind for call in calls[:5]] == ["text", "image", "audio", "video", "text"]
    names = [[each.name for each in call.turns[0].attachments] for call in calls]
    assert names[:8] == [[], ["0.png"], ["0.wav"], ["0.mp4"], [], ["1.png"], ["1.wav"], ["1.mp4"]]
    assert names[8:] == names[:8]
    assert len({attachment.data for attachment in made.values()}) == 6
    assert made == MIXED.make_media()
    assert made["image", 0] != replace(MIXED, seed=6).make_media()["image", 0]


def test_calls_say_how_long_the_answer_is_and_whose_cache_it_is() -> None:
    options = TEXT.call(0, {}).options
    assert options["max_tokens"] == 8 and options["ignore_eos"] is True
    assert options["cache_salt"] == "s"
    assert "speculation" not in options
    with_drafts = replace(TEXT, max_draft_tokens=2).call(0, {}).options
    assert with_drafts["speculation"] == {"enabled": True, "max_draft_tokens": 2}
    without = replace(TEXT, max_draft_tokens=0).call(0, {}).options
    assert without["speculation"] == {"enabled": False, "max_draft_tokens": 0}


def test_media_are_what_they_say() -> None:
    with Image.open(io.BytesIO(media.picture(1, 60))) as picture:
        assert (picture.format, picture.size, picture.mode) == ("PNG", (60, 60), "RGB")
        pixels = np.asarray(picture)
    assert (pixels[:8, :8] == pixels[0, 0]).all()  # one block
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) == 64  # 8 x 8 of them
    with av.open(io.BytesIO(media.sound(1, 0.5))) as sound:
        frames = list(sound.decode(audio=0))
        assert sum(frame.samples for frame in frames) == 12_000
        assert frames[0].sample_rate == media.SAMPLE_RATE
    with av.open(io.BytesIO(media.video(1, 57, 1.5))) as video:
        frames = list(video.decode(video=0))
        assert [(frame.width, frame.height) for frame in frames] == [(56, 56)] * 6
