"""What a training run is told, and how much of everything it makes and learns."""

from dataclasses import dataclass
from pathlib import Path

from mimo.checkpoint.directory import BUNDLED
from mimo.config import option


@dataclass(frozen=True, slots=True)
class Recipe:
    """Amounts. Steps are fixed in advance, so a run that is resumed ends where another would.

    The full recipe is sized for 2 cores: encoders and decoder below 100 minutes each, drafts below
    30, on an otherwise idle machine.
    """

    # Samples to make: training, then held out for each split.
    shapes: int = 36_000
    texts: int = 60_000
    digits: int = 12_000
    videos: int = 20_000
    sounds: int = 26_000
    held_out: int = 500

    # Vision. Batches are those of one rank: shapes, texts, digits, videos.
    vision_steps: int = 4_000
    vision_batch: tuple[int, int, int, int] = (12, 30, 8, 6)
    vision_lr: float = 0.015

    # Audio: without quantiser, then through it.
    audio_steps: int = 3_500
    quantised_steps: int = 1_000
    audio_batch: int = 16
    audio_lr: float = 0.02

    # Language model: text alone, everything together, then the drafts. Examples per step and rank.
    text_steps: int = 400
    decoder_steps: int = 2_600
    mtp_steps: int = 300
    decoder_batch: int = 48
    decoder_lr: float = 0.011

    kmeans_clips: int = 4_000
    kmeans_rounds: int = 25
    evaluated: int = 200  # held-out examples per skill
    checked: int = 400  # held-out samples per encoder gate
    save_every_s: float = 300.0


FULL = Recipe()

# Everything once, in a minute: for tests and for trying a change of the pipeline.
SMOKE = Recipe(
    shapes=40,
    texts=24,
    digits=16,
    videos=12,
    sounds=60,
    held_out=40,
    vision_steps=3,
    vision_batch=(2, 2, 1, 1),
    audio_steps=3,
    quantised_steps=3,
    audio_batch=3,
    text_steps=1,
    decoder_steps=2,
    mtp_steps=3,
    decoder_batch=4,
    kmeans_clips=24,
    kmeans_rounds=3,
    evaluated=4,
    checked=8,
)

RECIPES = {"full": FULL, "smoke": SMOKE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Train the bundled model."""

    train_dir: str = option(
        str(Path("~/.cache/mimo-train").expanduser()),
        help="data and state; outside the clone, so that a run survives it",
    )
    out: str = option(str(BUNDLED), help="model directory that export writes")
    recipe: str = option("full", help="how much of everything", choices=tuple(RECIPES))
    seed: int = option(0, help="seed of data, initial weights and sampling")
    ranks: int = option(2, help="processes of the decoder and draft stages, one thread each")
    ignore_gates: bool = option(False, help="go on when a stage stays below its floor")

    @property
    def amounts(self) -> Recipe:
        return RECIPES[self.recipe]

    @property
    def root(self) -> Path:
        return Path(self.train_dir).expanduser()

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def state(self) -> Path:
        return self.root / "state"
