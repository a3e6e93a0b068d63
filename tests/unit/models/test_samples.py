"""The demo's media and questions are of the kinds that the bundled model is trained on."""

import random
import wave
from collections.abc import Callable
from ctypes.util import find_library
from itertools import pairwise

import av
import numpy as np
import pytest
from PIL import Image

from mimo.cli.demo import QUESTIONS, SAMPLES
from models import samples
from models.training import questions, text_skills
from models.training.draw import stream
from models.training.questions import Exchange

ANSWERS = {question.label: (question.text, question.answer) for question in QUESTIONS}
SENTENCES = [
    questions.seen(samples.SCENE),
    questions.heard("digits", samples.SPOKEN),
    questions.seen_happening(samples.DIRECTION, samples.moving()),
]

TRAINED: dict[str, Callable[[random.Random], Exchange]] = {
    "text": text_skills.chat,
    "picture": lambda rng: questions.about_picture(rng, samples.SCENE),
    "sound": lambda rng: questions.about_sound(rng, "digits", samples.SPOKEN),
    "video": lambda rng: questions.about_video(rng, samples.DIRECTION, samples.moving()),
    "all three": lambda rng: questions.about_everything(rng, SENTENCES),
    "picture again": lambda rng: questions.about_picture(rng, samples.SCENE),
}


@pytest.mark.parametrize("label", ANSWERS)
def test_training_asks_the_demo_questions_and_gives_their_answers(label: str) -> None:
    drawn = [TRAINED[label](stream("demo", label, index)) for index in range(300)]
    assert ANSWERS[label] in {(exchange.question, exchange.answer) for exchange in drawn}


def test_the_picture_is_the_one_that_is_drawn() -> None:
    with Image.open(SAMPLES / "picture.png") as image:
        assert np.array_equal(np.asarray(image), np.asarray(samples.picture()))


def test_the_clip_is_the_one_that_is_drawn_and_has_sound() -> None:
    with av.open(str(SAMPLES / "clip.mp4")) as container:
        stored = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert float(container.streams.video[0].average_rate) == samples.FRAME_RATE
        assert len(container.streams.audio) == 1
    drawn = samples.clip()
    assert np.stack(stored).shape == drawn.shape
    assert np.abs(np.stack(stored).astype(int) - drawn).mean() < 6
    assert all(left.x < right.x for left, right in pairwise(samples.moving()))
    assert len(samples.sound_track()) / samples.SAMPLE_RATE < len(drawn) / samples.FRAME_RATE


def test_the_sound_is_speech_of_three_digits() -> None:
    """Its length; the speaker varies the last bits."""
    with wave.open(str(SAMPLES / "sound.wav")) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (24_000, 1, 2)
        length = sound.getnframes()
    assert 1.0 < length / 24_000 < 2.5
    if find_library("espeak-ng"):
        assert abs(len(samples.speech()) - length) < 2_400
