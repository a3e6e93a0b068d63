"""Synthetic data: right answers, and nothing held out is trained on."""

import json
import re
from ctypes.util import find_library
from pathlib import Path

import numpy as np
import pytest

from mimo.errors import StartupError
from models.training import questions, text_skills
from models.training.corpus import DataSet, check_disjoint, draw_samples
from models.training.draw import is_held_out, stream
from models.training.ragged import Ragged, write_ragged
from models.training.synth.reading import (
    ALPHABET,
    FONT_FOLDER,
    FONTS,
    UNSEEN_FONTS,
    draw_text,
    font,
)
from models.training.synth.shapes import COLOURS, KINDS, Scene, Shape, patch_labels, render

RED_CIRCLE = Shape("circle", "red", 0.25, 0.5, 0.2)
BLUE_SQUARE = Shape("square", "blue", 0.75, 0.5, 0.2)


def data_set(folder: Path, *samples: tuple[np.ndarray, dict[str, object]]) -> DataSet:
    write_ragged(folder, [array for array, _ in samples])
    lines = [json.dumps(facts | {"digest": str(array.sum())}) for array, facts in samples]
    (folder / "facts.jsonl").write_text("\n".join(lines))
    return DataSet.open(folder)


def test_ragged_arrays_come_back(tmp_path: Path) -> None:
    arrays = [np.arange(6).reshape(2, 3), np.zeros((0, 3), np.int64), np.ones((1, 3), np.int64)]
    write_ragged(tmp_path, arrays)
    stored = Ragged(tmp_path)
    assert len(stored) == 3 and stored.shape(0) == (2, 3)
    for array, back in zip(arrays, stored, strict=True):
        assert np.array_equal(array, back)


def test_a_sample_depends_on_its_index_alone() -> None:
    whole = draw_samples(0, "shapes", "train", 0, 4)
    late = draw_samples(0, "shapes", "train", 3, 4)
    assert np.array_equal(whole[3][0], late[0][0]) and whole[3][1] == late[0][1]
    other = draw_samples(0, "shapes", "held_out", 3, 4)
    assert whole[3][1] != other[0][1]


@pytest.mark.parametrize(
    "leak",
    [
        (np.full((2, 2), 1), {"original": 7}),  # the same picture
        (np.full((2, 2), 9), {"original": 5}),  # another picture of a scan that was trained on
        (np.full((2, 2), 8), {"text": "ABC"}),
    ],
    ids=["content", "scan", "text"],
)
def test_held_out_data_that_was_trained_on_is_found(
    tmp_path: Path, leak: tuple[np.ndarray, dict[str, object]]
) -> None:
    train = data_set(
        tmp_path / "train",
        (np.full((2, 2), 1), {"original": 5}),
        (np.full((2, 2), 2), {"text": "ABC"}),
    )
    honest = data_set(tmp_path / "honest", (np.full((2, 2), 3), {"original": 6}))
    check_disjoint({"train": train, "held_out": honest})
    leaky = data_set(tmp_path / "leaky", leak)
    with pytest.raises(StartupError, match="trained on"):
        check_disjoint({"train": train, "held_out": leaky})


def test_strings_are_either_trained_or_held_out() -> None:
    for skill in (text_skills.copy, text_skills.reverse, text_skills.sort):
        trained = {skill(stream(i), held_out=False).answer for i in range(300)}
        kept = {skill(stream(i), held_out=True).answer for i in range(300)}
        assert not {s for s in trained & kept if len(s.replace(" ", "")) >= 3} or skill is (
            text_skills.sort  # two orders of the same symbols have one answer
        )
    for held_out in (False, True):
        texts = [draw_text(stream(i), 3 + i % 3, held_out=held_out) for i in range(60)]
        assert all(is_held_out(text) == held_out for text in texts)


def test_answers_of_text_skills_follow_from_their_questions() -> None:
    for index in range(200):
        rng = stream("answers", index)
        copied = text_skills.copy(rng, held_out=False)
        assert copied.question.endswith(copied.answer)
        turned = text_skills.reverse(rng, held_out=False)
        assert turned.answer[::-1] in turned.question
        ordered = text_skills.sort(rng, held_out=False)
        shown = re.sub(r"^Sort:? ", "", ordered.question).split(" ")
        assert ordered.answer.split(" ") == sorted(shown)
        left, right = text_skills.sums(rng).answer.rstrip(".").split(" = ")
        assert eval(left) == int(right)


def test_answers_about_a_pair() -> None:
    scene = Scene("left", (RED_CIRCLE, BLUE_SQUARE))
    asked = {}
    for index in range(200):
        exchange = questions.about_picture(stream(index), scene)
        asked[exchange.question] = exchange.answer
    assert asked["Describe the image."] == "A red circle to the left of a blue square."
    assert asked["How many shapes are there?"] == "There are 2 shapes."
    assert asked["What is on the left?"] == "A red circle is on the left."
    assert asked["What is on the right?"] == "A blue square is on the right."
    assert asked["What colour is the circle?"] == "The circle is red."
    assert asked["Which shape is blue?"] == "The square is blue."


def test_the_first_shape_of_a_pair_is_left_or_above() -> None:
    scenes = [Scene.from_json(f) for _, f in draw_samples(0, "shapes", "train", 0, 60)]
    assert {scene.layout for scene in scenes} == {"one", "left", "above", "row", "many"}
    for scene in scenes:
        match scene.layout:
            case "left":
                assert scene.shapes[0].x < scene.shapes[1].x
            case "above":
                assert scene.shapes[0].y < scene.shapes[1].y
            case "row":
                assert [s.x for s in scene.shapes] == sorted(s.x for s in scene.shapes)


def test_a_shape_has_its_colour_where_its_label_says() -> None:
    for kind in KINDS:
        for colour, rgb in COLOURS.items():
            shape = Shape(kind, colour, 0.5, 0.5, 0.4)
            labels = patch_labels((shape,), 6, 6)
            assert set(np.unique(labels)) == {0, shape.label} and labels[2, 2] == shape.label
            pixels = np.asarray(render((shape,), 96, 96, (255, 255, 255), stream(0)))
            assert np.abs(pixels[48, 48].astype(int) - rgb).max() <= 14
            assert (pixels[0, 0] == 255).all()


def test_a_moving_shape_moves_where_its_facts_say() -> None:
    for frames, facts in draw_samples(0, "videos", "train", 0, 40):
        shapes = [Shape(*fields) for fields in facts["shapes"]]
        assert len(frames) == len(shapes) >= 4
        right, down = shapes[-1].x - shapes[0].x, shapes[-1].y - shapes[0].y
        steps = {"right": right, "left": -right, "down": down, "up": -down}
        if facts["change"] == "colour":
            assert shapes[0].colour != shapes[-1].colour
        else:
            assert steps[facts["change"]] == max(steps.values()) > 0.2


def test_sounds_are_named_as_they_are_heard() -> None:
    assert questions.heard("digits", ["four", "seven", "one"]) == "The voice says: 4 7 1."
    assert questions.heard("commands", ["go", "left"]) == "The voice says: go left."
    assert questions.heard("beeps", ["beep"]) == "I hear 1 beep."
    assert questions.heard("beeps", ["beep"] * 3) == "I hear 3 beeps."


@pytest.mark.check
def test_speech_is_spoken() -> None:
    """With eSpeak NG: longer sequences take longer, no recording is silent."""
    if find_library("espeak-ng") is None:
        pytest.skip("needs eSpeak NG")
    lengths: dict[int, list[int]] = {}
    for samples, facts in draw_samples(0, "sounds", "unseen", 0, 60):
        assert 300 < np.abs(samples.astype(int)).max() <= 32_767
        if facts["kind"] == "digits":
            lengths.setdefault(len(facts["words"]), []).append(len(samples))
    assert np.mean(lengths[5]) > np.mean(lengths[1]) + 24_000


@pytest.mark.check
def test_every_font_draws_every_character() -> None:
    """With Debian's fonts: no character is drawn like a missing one."""
    if not Path(FONT_FOLDER, FONTS[0]).exists() or not Path(FONT_FOLDER, FONTS[-1]).exists():
        pytest.skip("needs fonts-dejavu and fonts-liberation")
    for name in (*FONTS, *UNSEEN_FONTS):
        face = font(name, 30)
        missing = bytes(face.getmask("\uffff"))
        assert all(bytes(face.getmask(character)) != missing for character in ALPHABET), name
