"""The stages in their order, what each starts from and what it leaves behind.

``root/state`` holds one file per stage, ``root/data`` the data sets and what the frozen encoders
made of them, ``root/reports`` figures, ``root/logs`` losses. Every step is skipped when its result
is there, so any command resumes where the last one stopped.
"""

import json
import time
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mimo.cli import score
from mimo.errors import StartupError
from mimo.nn.heap import keep_freed_buffers
from models.training import corpus as corpora
from models.training import gates
from models.training.audio_stage import AudioStage
from models.training.batch import Encoded
from models.training.card import model_card
from models.training.corpus import HELD_OUT_SPLITS, SPLITS, Corpus
from models.training.decoder_stage import DecoderStage
from models.training.evaluate import evaluate
from models.training.examples import Examples
from models.training.export import export
from models.training.features import cache_codes, cache_mels, cache_patches
from models.training.loop import Stage, bars, run
from models.training.mtp_stage import MtpStage
from models.training.networks import Networks, round_to_bf16
from models.training.parallel import ALONE, Ranks
from models.training.prompts import write_prompts
from models.training.quantiser import kmeans_codebooks
from models.training.ragged import Ragged
from models.training.settings import Settings
from models.training.skills import Skills
from models.training.state import (
    SUFFIX,
    load_modules,
    module_state,
    read_state,
    steps_done,
    write_state,
)
from models.training.vision_stage import VisionStage

CODEBOOKS, ENCODERS = "codebooks", "encoders"  # states that are no stage's


class Pipeline:
    """One training run. Everything but the stages' steps happens in this process."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console

    def everything(self) -> None:
        """All stages, a gate after each."""
        self.encoders()
        self.decoder()
        self.mtp()

    def data(self) -> None:
        """Make the data sets and the spectrograms of all sounds."""
        with bars() as progress:
            corpora.make(self._settings, progress)
            cache_mels(self._corpus(), Networks.fresh(0).mel(), self._settings.data, progress)

    def encoders(self) -> None:
        """Stage A: train tower and tokenizer, round them, and run them over the data sets."""
        self.data()
        if not self._path(ENCODERS).exists():
            self._train("vision")
            self._train("audio")
            self._make_codebooks()
            self._train("codes")
            self._finish_encoders()
        networks = self.networks()
        with bars() as progress:
            cache_codes(self._corpus(), networks.tokenizer, self._settings.data, progress)
            cache_patches(self._corpus(), networks.tower, self._settings.data, progress)
        figures = self._read_report(ENCODERS)
        self._console.print(gates.table("encoders", gates.ENCODERS, figures))
        self._check("encoders", score.missed(gates.ENCODERS, figures, gates.ENCODERS_FLOOR))

    def decoder(self) -> None:
        """Stage B."""
        self._train("decoder")
        figures = score.skill_figures(self.evaluate("decoder"))
        self._check("decoder", score.missed(gates.SKILLS, figures, gates.SKILLS_FLOOR))

    def mtp(self) -> None:
        """Stage C. Nothing is built on it, so it has goals but no floor."""
        self._train("mtp")
        figures = self.evaluate("mtp")
        self._console.print(gates.table("drafts", gates.DRAFTS, figures))

    def evaluate(self, name: str = "evaluation") -> dict[str, Any]:
        """Measure what exists so far, as it would be stored, and print it."""
        networks = self.networks()
        for module in networks.modules().values():
            round_to_bf16(module)
        examples, encoded = self._examples()
        with bars() as progress:
            count = self._settings.amounts.evaluated
            figures = score.report(evaluate(networks, examples, encoded, count, progress))
        self._write_report(name, figures)
        self._console.print(score.table(figures, gates.SKILLS))
        return figures

    def networks(self) -> Networks:
        """The best weights there are of every part: fresh, half trained or finished."""
        networks = Networks.fresh(self._settings.seed)
        whole = networks.modules()
        for name, parts in (
            ("vision", ("tower",)),
            ("audio", ("tokenizer",)),
            (CODEBOOKS, ("tokenizer",)),
            ("codes", ("tokenizer",)),
            (ENCODERS, ("tower", "tokenizer")),
            ("decoder", ("decoder", "embedder")),
            ("mtp", ("mtp",)),
        ):
            if self._path(name).exists():
                state, _ = read_state(self._path(name))
                load_modules({part: whole[part] for part in parts}, state)
                if name == "decoder":  # the tower's last layers belong to this stage
                    load_modules({"merger": networks.tower.merger}, state)
        return networks

    def export(self) -> int:
        """Write a checkpoint of what exists, with its card if it has been measured. -> bytes."""
        directory = Path(self._settings.out)
        size = export(self.networks(), directory)
        for name in ("mtp", "evaluation", "decoder"):
            if (self._settings.root / "reports" / f"{name}.json").exists():
                card = model_card(self._read_report(name), self._settings.amounts)
                (directory / "README.md").write_text(card, encoding="utf-8")
                break
        return size

    def prompts(self) -> Path:
        """Write held-out questions of every skill with their media, and the goals for the answers.
        Needs nothing trained, and of the data sets the held-out ones alone. -> the folder."""
        settings = self._settings
        folder = settings.root / "prompts"
        with bars() as progress:
            corpora.make(settings, progress, HELD_OUT_SPLITS)
            corpus = Corpus.open(settings.data, HELD_OUT_SPLITS)
            examples, count = Examples(Skills(corpus)), settings.amounts.evaluated
            write_prompts(examples, corpus, settings.seed, folder, count, progress)
        return folder

    def status(self) -> dict[str, str]:
        """Steps done of every stage."""
        return {name: f"{steps_done(self._path(name))}/{n}" for name, n in self._steps().items()}

    def _steps(self) -> dict[str, int]:
        amounts = self._settings.amounts
        return {
            "vision": amounts.vision_steps,
            "audio": amounts.audio_steps,
            "codes": amounts.quantised_steps,
            "decoder": amounts.text_steps + amounts.decoder_steps,
            "mtp": amounts.mtp_steps,
        }

    def build(self, name: str, ranks: Ranks) -> Stage:
        """A stage at its beginning. Raises StartupError when the stages before are not done."""
        settings, amounts, seed = self._settings, self._settings.amounts, self._settings.seed
        corpus = self._corpus()
        if name == "vision":
            return VisionStage(Networks.fresh(seed).tower, corpus, amounts, seed, ranks)
        if name in ("audio", "codes"):
            networks = Networks.fresh(seed)
            quantised = name == "codes"
            heads = None
            if quantised:
                state, _ = self._read(CODEBOOKS)
                load_modules({"tokenizer": networks.tokenizer}, state)
                heads, _ = self._read("audio")
            mels = {split: Ragged(settings.data / "mels" / split) for split in SPLITS["sounds"]}
            stage = AudioStage(
                networks.tokenizer, mels, corpus, amounts, seed, ranks, quantised=quantised
            )
            if heads is not None:
                stage.take_over(heads)
            return stage
        self._read(ENCODERS)
        networks = self.networks()
        examples, encoded = self._examples()
        networks.tower.requires_grad_(False)
        networks.tokenizer.requires_grad_(False)
        if name == "decoder":
            networks.tower.merger.requires_grad_(True)
            return DecoderStage(networks, examples, encoded, amounts, seed, ranks)
        self._read("decoder")
        networks.decoder.requires_grad_(False)
        networks.embedder.requires_grad_(False)
        return MtpStage(networks, examples, encoded, amounts, seed, ranks)

    def _train(self, name: str) -> None:
        """Run a stage in as many processes as the settings say."""
        if steps_done(self._path(name)) == self._steps()[name]:
            return
        meeting_point = self._settings.root / f"meeting-{time.time_ns()}"
        self._settings.root.mkdir(parents=True, exist_ok=True)
        context = get_context("spawn")
        workers = [
            context.Process(target=train_rank, args=(self._settings, name, rank, meeting_point))
            for rank in range(self._settings.ranks)
        ]
        for worker in workers:
            worker.start()
        try:
            while any(worker.is_alive() for worker in workers):
                if any(worker.exitcode for worker in workers):
                    break
                workers[0].join(timeout=1)
        finally:
            for worker in workers:
                worker.terminate()  # the others wait for one that is gone
                worker.join()
            meeting_point.unlink(missing_ok=True)
        if any(worker.exitcode for worker in workers):
            raise StartupError(f"stage {name} failed; its last state is kept, run again to resume")

    def _make_codebooks(self) -> None:
        """k-means on the features of the trained tokenizer."""
        if self._path(CODEBOOKS).exists():
            return
        stage = self.build("audio", ALONE)
        assert isinstance(stage, AudioStage)
        state, _ = self._read("audio")
        stage.load(state)
        amounts = self._settings.amounts
        generator = torch.Generator().manual_seed(self._settings.seed)
        tokenizer = stage.tokenizer
        features = stage.features(amounts.kmeans_clips)
        rest = kmeans_codebooks(tokenizer.quantizer, features, amounts.kmeans_rounds, generator)
        self._write_report("audio", {**stage.measure(), "unexplained variance": rest})
        write_state(self._path(CODEBOOKS), module_state({"tokenizer": tokenizer}), 1)

    def _finish_encoders(self) -> None:
        """Round tower and tokenizer as they will be stored, measure them, keep them."""
        vision, codes = self.build("vision", ALONE), self.build("codes", ALONE)
        assert isinstance(vision, VisionStage) and isinstance(codes, AudioStage)
        for stage in (vision, codes):
            state, _ = self._read(stage.name)
            stage.load(state)
        round_to_bf16(vision.tower)
        round_to_bf16(codes.tokenizer)
        self._write_report(ENCODERS, vision.measure() | codes.measure())
        parts = {"tower": vision.tower, "tokenizer": codes.tokenizer}
        write_state(self._path(ENCODERS), module_state(parts), 1)

    def _examples(self) -> tuple[Examples, Encoded]:
        encoded = Encoded(self._settings.data)
        skills = Skills(self._corpus(), bf16_clips=encoded.num_bf16_clips)
        return Examples(skills), encoded

    def _corpus(self) -> Corpus:
        return Corpus.open(self._settings.data, SPLITS)

    def _path(self, name: str) -> Path:
        return self._settings.state / f"{name}{SUFFIX}"

    def _read(self, name: str) -> tuple[dict[str, torch.Tensor], int]:
        if not self._path(name).exists():
            raise StartupError(f"{self._path(name)} does not exist: train what comes before first")
        return read_state(self._path(name))

    def _check(self, stage: str, below: list[str]) -> None:
        if below and not self._settings.ignore_gates:
            raise StartupError(
                f"{stage}: below the floor: {', '.join(below)}; --ignore-gates goes on anyway"
            )

    def _write_report(self, name: str, figures: Mapping[str, Any]) -> None:
        folder = self._settings.root / "reports"
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(figures, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")

    def _read_report(self, name: str) -> dict[str, Any]:
        path = self._settings.root / "reports" / f"{name}.json"
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return figures


def train_rank(settings: Settings, name: str, rank: int, meeting_point: Path) -> None:
    """The life of one training process."""
    torch.set_num_threads(1)
    keep_freed_buffers(512 << 20)
    ranks = Ranks.join(rank, settings.ranks, meeting_point)
    stage = Pipeline(settings, Console()).build(name, ranks)
    with bars() as progress:
        save_every_s = settings.amounts.save_every_s
        run(stage, settings.root, progress, save_every_s=save_every_s, ranks=ranks)
