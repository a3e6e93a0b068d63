"""Skills without media: copying, reversing and sorting, small sums, greetings."""

import random

from models.training.draw import is_held_out
from models.training.questions import Exchange
from models.training.synth.reading import ALPHABET

LONGEST_COPY, LONGEST_REVERSAL, LONGEST_SORT = 6, 5, 6
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

CHAT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hello", "Hi!", "Hi there.", "Good morning."), "Hello! How can I help you?"),
    (
        ("Who are you?", "What are you?", "Tell me who you are."),
        "I am a tiny model. I can look at pictures, listen to short sounds and answer simple "
        "questions.",
    ),
    (
        ("What can you do?", "How can you help me?"),
        "I can describe shapes, read short text, hear digits and beeps, and do small sums.",
    ),
    (("Thank you.", "Thanks!", "Thanks a lot."), "You are welcome!"),
    (("Bye.", "Goodbye!", "See you later."), "Goodbye! Have a nice day."),
    (("How are you?", "How do you feel?"), "I am fine, thank you. How are you?"),
    (("What is your name?", "Do you have a name?"), "My name is Tiny."),
    (("Are you a large model?", "How big are you?"), "I am very small: ten million numbers."),
    (("Tell me a joke.", "Say something funny."), "What does a tiny model eat? Small bytes."),
    (("What colour is the sky?",), "The sky is blue."),
    (("What day comes after Monday?",), "Tuesday comes after Monday."),
    (("Count to five.",), "1, 2, 3, 4, 5."),
    (("Say the alphabet.",), " ".join(LETTERS)),
    (("Name three colours.", "List three colours."), "Red, green and blue."),
    (("Name three shapes.", "List three shapes."), "A circle, a square and a triangle."),
)


def copy(rng: random.Random, *, held_out: bool) -> Exchange:
    text = _string(rng, LONGEST_COPY, held_out=held_out)
    return Exchange(rng.choice((f"Copy: {text}", f"Repeat: {text}", f"Say {text}")), text, "copy")


def reverse(rng: random.Random, *, held_out: bool) -> Exchange:
    text = _string(rng, LONGEST_REVERSAL, held_out=held_out)
    asked = rng.choice((f"Reverse: {text}", f"Write {text} in reverse."))
    return Exchange(asked, text[::-1], "reverse")


def sort(rng: random.Random, *, held_out: bool) -> Exchange:
    """Digits or letters, not both, with repetitions."""
    symbols = rng.choice(("0123456789", LETTERS))
    while True:
        items = [rng.choice(symbols) for _ in range(rng.randint(2, LONGEST_SORT))]
        if _is_wanted("".join(items), held_out=held_out):
            break
    shown = " ".join(items)
    asked = rng.choice((f"Sort: {shown}", f"Sort {shown}"))
    return Exchange(asked, " ".join(sorted(items)), "sort")


def sums(rng: random.Random) -> Exchange:
    """The table of one-digit sums and differences, every entry of which is trained on."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    if rng.random() < 0.4:
        a, b = max(a, b), min(a, b)
        return Exchange(rng.choice((f"What is {a} - {b}?", f"{a} - {b} = ?")),
                        f"{a} - {b} = {a - b}.", "minus")  # fmt: skip
    asked = rng.choice((f"What is {a} + {b}?", f"{a} + {b} = ?", f"Add {a} and {b}."))
    return Exchange(asked, f"{a} + {b} = {a + b}.", "plus")


def chat(rng: random.Random) -> Exchange:
    questions, answer = rng.choice(CHAT)
    return Exchange(rng.choice(questions), answer, "chat")


def _string(rng: random.Random, longest: int, *, held_out: bool) -> str:
    while True:
        text = "".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, longest)))
        if _is_wanted(text, held_out=held_out):
            return text


def _is_wanted(text: str, *, held_out: bool) -> bool:
    """Strings of one or two symbols are too few to keep some of them back."""
    return len(text) < 3 or is_held_out(text) == held_out
