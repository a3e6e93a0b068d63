"""The model card: what the bundled model can do, how well, and how it was made."""

from collections.abc import Mapping
from typing import Any

from mimo.cli.score import skill_figures
from models.training import gates
from models.training.settings import Recipe

_HEAD = """# mimo-tiny

A model of ten million parameters with the architecture of MiMo-V2.5: hybrid attention with sinks, a
mixture of experts, three blocks for multi-token prediction, a vision tower with banded attention,
an audio tokenizer with residual quantisation. It exists so that a serving system can be run and
tested whole, offline and on a laptop, with answers that are right or wrong.

## What it can do
Questions like these, about media like these:
* coloured shapes in a picture: "What is in the picture?" - "A red circle to the left of a blue
  square."; kind, colour, number up to five, relative position
* one to five printed capitals or digits; a single handwritten digit
* spoken English digits, twelve commands and seven colours: "The voice says: 4 7 1."; beeps to count
* short videos of one shape that moves or changes its colour, with or without sound
* a picture and a voice together; a picture, a sound and a video in one question
* text: copying, reversing and sorting a few symbols, sums of two digits, greetings

## What it cannot do
Everything else. It knows synthetic data only: no photographs, no natural speech, no free
conversation, no facts. It answers such requests fluently and wrongly.
"""

_MADE = """
## How it was made
Trained from scratch by `python -m models.training all` on two CPU cores, through the modules that
serve it, on data that the same command makes. Nothing was taken from another model.

| data | training samples | source and licence |
|---|---|---|
| shapes, videos | {shapes}, {videos} | drawn with Pillow; no rights of others |
| printed text | {texts} | DejaVu fonts (Bitstream Vera licence), Liberation fonts (SIL OFL 1.1) |
| handwritten digits | {digits} | from 1,497 UCI scans in scikit-learn (CC BY 4.0) |
| sounds | {sounds} | eSpeak NG voices (the program is GPL-3.0, its output is free to use); tones |

Held-out samples share no content, no scanned original and no string of three symbols with training
data. "Unseen" are fonts, voices and speeds that were never trained on. Sums and greetings are
closed lists, all of which are trained on.

The weights are under Apache-2.0, like the rest of this repository.
"""


def model_card(report: Mapping[str, Any], amounts: Recipe) -> str:
    """README.md of the checkpoint, from what :func:`mimo.cli.score.report` made."""
    counts = ("shapes", "videos", "texts", "digits", "sounds")
    made = _MADE.format(**{name: f"{getattr(amounts, name):,}" for name in counts})
    return f"{_HEAD}\n{_accuracy(report)}{made}"


def _accuracy(report: Mapping[str, Any]) -> str:
    """Measured figures beside the goals; a missed goal is shown like any other."""
    figures = skill_figures(report)
    lines = ["## Measured", "Share of held-out answers that are right as a whole, greedily.", ""]
    lines += ["| skill | right | goal | examples |", "|---|---|---|---|"]
    for name, figure in figures.items():
        goal = f"{100 * gates.SKILLS[name]:.0f} %" if name in gates.SKILLS else ""
        skill, _, part = name.partition(": ")
        result = report["skills"][skill]
        count = result["parts"][part].split("/")[1] if part else result["n"]
        lines.append(f"| {name} | {100 * figure:.1f} % | {goal} | {count} |")
    by_position = ", ".join(f"{100 * share:.0f} %" for share in report["acceptance_by_position"])
    lines += [
        "",
        f"Tokens per step with three drafts: {report['acceptance_length']} (mean over skills), "
        f"{report['acceptance_length_predictable']} without copying, reversing and reading. "
        f"Drafts accepted by position: {by_position}.",
        "",
    ]
    return "\n".join(lines)
