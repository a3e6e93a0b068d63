"""What each stage has to reach, and from where on it makes no sense to go on.

Goals are shares of right held-out answers. Below its floor a stage would spoil the next one.
"""

from collections.abc import Mapping

from rich.table import Table

ENCODERS = {
    "patches": 0.96,
    "reading": 0.85,
    "reading, unseen fonts": 0.70,
    "digits": 0.97,
    "motion": 0.90,
    "words": 0.95,
    "words, unseen voices": 0.92,
}
SKILLS = {
    "shapes": 0.82,
    "shapes: one": 0.95,
    "shapes: count": 0.75,
    "shapes: pair": 0.80,
    "reading": 0.50,
    "reading: 1-2 characters": 0.80,
    "reading, unseen": 0.35,
    "digits": 0.91,
    "speech": 0.89,
    "speech, unseen": 0.84,
    "speech: commands": 0.94,
    "speech: colour": 0.94,
    "speech: beeps": 0.82,
    "video: colour": 0.88,
    "video: motion": 0.60,
    "voice and picture": 0.92,
    "copy": 0.85,
    "reverse": 0.50,
    "sort": 0.78,
    "sums": 0.85,
    "chat": 0.98,
}
DRAFTS = {"acceptance_length": 2.6, "acceptance_length_predictable": 2.8}

# Floors as shares of the goals: encoders cannot be repaired later, the decoder spoils nothing.
ENCODERS_FLOOR, SKILLS_FLOOR = 0.93, 0.6


def table(title: str, goals: Mapping[str, float], figures: Mapping[str, float]) -> Table:
    table = Table(title=title)
    for column in ("figure", "reached", "goal", ""):
        table.add_column(column)
    for name, goal in goals.items():
        figure = figures.get(name, 0.0)
        table.add_row(name, f"{figure:.3f}", f"{goal:.3f}", "" if figure >= goal else "missed")
    return table
