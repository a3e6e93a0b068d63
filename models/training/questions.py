"""What can be asked about the synthetic media, and the one right answer to each question.

Each function draws a question about one medium. Answers are whole sentences, and the same facts
always give the same answer to the same question.
"""

import random
from dataclasses import dataclass
from typing import Any

from models.training.synth.shapes import COLOURS, KINDS, Scene, Shape
from models.training.synth.sound import DIGITS

DESCRIBE = ("Describe the image.", "What is in this picture?", "What is in the picture?",
            "What do you see?", "Describe the picture.")  # fmt: skip
READ = ("Read the text.", "What is written here?", "What does the text say?", "Read the letters.")
DIGIT = ("Which digit is this?", "Read the handwritten digit.", "What digit do you see?")
LISTEN = ("What do you hear?", "What does the voice say?", "Transcribe the audio.")
COUNT_BEEPS = ("How many beeps do you hear?", "Count the beeps.", "What do you hear?")
WATCH = ("What happens in the video?", "Describe the video.", "What do you see in the video?")
SEE_AND_HEAR = ("What do you see and hear?", "Describe what you see and hear.")
SAME_COLOUR = ("Does the voice name the colour in the picture?",
               "Does the voice say the colour of the shape?")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, its answer, and which part of its skill it belongs to when accuracy is told."""

    question: str
    answer: str
    part: str


def about_picture(rng: random.Random, scene: Scene) -> Exchange:
    shapes = scene.shapes
    choices = [*[_describe(rng, scene)] * 2]
    if len(shapes) > 1 or rng.random() < 0.3:
        choices += [_count(rng, scene)] * (4 if scene.layout == "many" else 1)
    match scene.layout:
        case "one":
            choices += _single(rng, shapes[0])
        case "left" | "above":
            choices += [*choices[:1], *_relation(rng, scene)]
        case "row":
            middle = f"In the middle is {_a(shapes[1])}."
            asked = rng.choice(("What is in the middle?", "Which shape is in the middle?"))
            choices.append(Exchange(asked, middle, "row"))
    if scene.layout in ("one", "many"):
        choices.append(_is_there(rng, shapes))
    return rng.choice(choices)


def about_text(rng: random.Random, text: str) -> Exchange:
    part = "1-2 characters" if len(text) <= 2 else "3-5 characters"
    return Exchange(rng.choice(READ), f"The text says: {text}", part)


def about_digit(rng: random.Random, digit: int) -> Exchange:
    return Exchange(rng.choice(DIGIT), f"The digit is {digit}.", "digit")


def about_sound(rng: random.Random, kind: str, words: list[str]) -> Exchange:
    questions = list(COUNT_BEEPS if kind == "beeps" else LISTEN)
    if kind == "digits":
        questions.append("Which digits do you hear?")
    if kind == "colour":
        questions.append("Which colour do you hear?")
    return Exchange(rng.choice(questions), heard(kind, words), kind)


def about_video(rng: random.Random, change: str, shapes: list[Shape]) -> Exchange:
    first, last = shapes[0], shapes[-1]
    if change == "colour":
        questions = [
            (rng.choice(WATCH), seen_happening(change, shapes)),
            ("Does the colour change?", f"Yes, it changes from {first.colour} to {last.colour}."),
            ("Which colour is it at the end?", f"At the end it is {last.colour}."),
        ]
        return Exchange(*rng.choice(questions), "colour")
    moves = seen_happening(change, shapes)
    definite = f"The {moves.removeprefix('A ').removeprefix('An ')}"
    questions = [
        (rng.choice(WATCH), moves),
        ("Where does the shape move?", definite),
        (f"Where does the {first.kind} move?", definite),
        ("Which way does it move?", definite),
    ]
    if rng.random() < 0.15:
        questions = [("Does the colour change?", f"No, it stays {first.colour}.")]
    return Exchange(*rng.choice(questions), "motion")


def about_voice_and_picture(rng: random.Random, shape: Shape, spoken: str) -> Exchange:
    if spoken == shape.colour:
        return Exchange(rng.choice(SAME_COLOUR), f"Yes, both are {spoken}.", "yes")
    answer = f"No, the voice says {spoken} but the picture is {shape.colour}."
    return Exchange(rng.choice(SAME_COLOUR), answer, "no")


def about_everything(rng: random.Random, sentences: list[str]) -> Exchange:
    """One sentence for each medium, in the order of the media."""
    return Exchange(rng.choice(SEE_AND_HEAR), " ".join(sentences), f"{len(sentences)} media")


def seen(scene: Scene) -> str:
    """A picture in one sentence."""
    names = [_a(shape) for shape in scene.shapes]
    match scene.layout:
        case "left":
            return _sentence(f"{names[0]} to the left of {names[1]}")
        case "above":
            return _sentence(f"{names[0]} above {names[1]}")
        case "row":
            return f"From left to right: {names[0]}, {names[1]} and {names[2]}."
        case "many" if len(names) > 1:
            return f"There are {len(names)} shapes."
    return _sentence(names[0])


def heard(kind: str, words: list[str]) -> str:
    """A sound in one sentence. Digits are written as digits."""
    if kind == "beeps":
        return f"I hear {len(words)} beep{'s' if len(words) > 1 else ''}."
    spoken = [str(DIGITS.index(word)) if word in DIGITS else word for word in words]
    return f"The voice says: {' '.join(spoken)}."


def seen_happening(change: str, shapes: list[Shape]) -> str:
    """A clip in one sentence."""
    first, last = shapes[0], shapes[-1]
    if change == "colour":
        return f"The {first.kind} changes from {first.colour} to {last.colour}."
    where = f"to the {change}" if change in ("left", "right") else change
    return _sentence(f"{_a(first)} moves {where}")


def _describe(rng: random.Random, scene: Scene) -> Exchange:
    part = {"left": "pair", "above": "pair", "many": "count"}.get(scene.layout, scene.layout)
    return Exchange(rng.choice(DESCRIBE), seen(scene), part)


def _count(rng: random.Random, scene: Scene) -> Exchange:
    number = len(scene.shapes)
    asked = rng.choice(("How many shapes are there?", "Count the shapes."))
    answer = f"There are {number} shapes." if number > 1 else "There is 1 shape."
    return Exchange(asked, answer, "count")


def _single(rng: random.Random, shape: Shape) -> list[Exchange]:
    colour = rng.choice((f"What colour is the {shape.kind}?", f"Which colour is the {shape.kind}?"))
    it = rng.choice(("What colour is it?", "Which colour is it?"))
    return [
        Exchange(colour, f"The {shape.kind} is {shape.colour}.", "one"),
        Exchange(it, f"It is {shape.colour}.", "one"),
        Exchange("Which shape is it?", f"It is a {shape.kind}.", "one"),
    ]


def _relation(rng: random.Random, scene: Scene) -> list[Exchange]:
    first, second = scene.shapes
    places = ("on the left", "on the right") if scene.layout == "left" else ("above", "below")
    place, there = rng.choice(list(zip(places, scene.shapes, strict=True)))
    opening = place if scene.layout == "left" else f"{place} the other"
    exchanges = [Exchange(f"What is {place}?", f"{_a(there).capitalize()} is {opening}.", "pair")]
    asked = rng.choice(scene.shapes)
    if first.kind != second.kind:
        question = f"What colour is the {asked.kind}?"
        exchanges.append(Exchange(question, f"The {asked.kind} is {asked.colour}.", "pair"))
    if first.colour != second.colour:
        question = f"Which shape is {asked.colour}?"
        exchanges.append(Exchange(question, f"The {asked.kind} is {asked.colour}.", "pair"))
    return exchanges


def _is_there(rng: random.Random, shapes: tuple[Shape, ...]) -> Exchange:
    there = [(shape.kind, shape.colour) for shape in shapes]
    kind, colour = rng.choice(there)
    while rng.random() < 0.5:
        kind, colour = rng.choice(KINDS), rng.choice(list(COLOURS))
    name = f"{colour} {kind}"
    question = f"Is there {_article(name)} {name}?"
    if (kind, colour) in there:
        return Exchange(question, f"Yes, there is {_article(name)} {name}.", "is there")
    return Exchange(question, f"No, there is no {name}.", "is there")


def _a(shape: Shape) -> str:
    name = f"{shape.colour} {shape.kind}"
    return f"{_article(name)} {name}"


def _article(name: str) -> str:
    return "an" if name[0] in "aeiou" else "a"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def scene_of(facts: dict[str, Any]) -> Scene:
    return Scene.from_json(facts)


def clip_of(facts: dict[str, Any]) -> tuple[str, list[Shape]]:
    return facts["change"], [Shape(*shape) for shape in facts["shapes"]]
