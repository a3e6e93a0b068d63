"""Stage A, pictures: the vision tower learns to name what every patch shows.

The language model's loss alone teaches a fresh tower slowly and, with Muon, ruins a good one. So
the tower learns first, from auxiliary heads on its patches before the merger: the shape on every
patch, in both frames of a pair; printed text by CTC over columns; digits; the direction of motion.
The heads are thrown away afterwards and the tower stays as it is.
"""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.training.corpus import HELD_OUT, TRAIN, UNSEEN, Corpus, DataSet, processor_config
from models.training.ctc import ctc_decode, ctc_loss
from models.training.draw import stream
from models.training.media import Patcher, Patches, picture_plan, video_plan
from models.training.networks import initialise
from models.training.optimizer import Optimizer, schedule
from models.training.parallel import ALONE, Ranks
from models.training.questions import clip_of, scene_of
from models.training.settings import Recipe
from models.training.state import load_modules, module_state, part
from models.training.synth.reading import ALPHABET
from models.training.synth.shapes import NUM_LABELS, patch_labels
from models.training.synth.video import DIRECTIONS
from services.vision.model import VisionTower
from services.vision.window import PatchLayout

_DIGIT_WEIGHT, _VIDEO_WEIGHT = 0.5, 0.5
_ADAM_LR = 1.5e-3
_HOLD = 0.3

KINDS = ("shapes", "texts", "digits", "videos")  # in the order of Recipe.vision_batch


class Heads(nn.ModuleDict):
    """What the tower is asked while it learns."""

    def __init__(self, width: int) -> None:
        super().__init__(
            {
                "first": nn.Linear(width, NUM_LABELS),  # shape on a patch of the first frame
                "second": nn.Linear(width, NUM_LABELS),  # and of the second
                "letters": nn.Linear(width, 1 + len(ALPHABET)),
                "digit": nn.Linear(width, 10),
                "motion": nn.Linear(width, 1 + len(DIRECTIONS)),
            }
        )


@contextmanager
def without_merger(tower: VisionTower) -> Iterator[None]:
    """Inside, the tower returns its patches [P, D] instead of merged tokens."""
    merger, tower.merger = tower.merger, nn.Identity()  # type: ignore[assignment]
    try:
        yield
    finally:
        tower.merger = merger


def patch_features(tower: VisionTower, items: Sequence[Patches]) -> list[Tensor]:
    """Patches of each item before the merger, in row order: [P, D] each."""
    with without_merger(tower):
        hidden = tower(torch.cat([item.values for item in items]), [item.grid for item in items])
    return list(hidden.split([len(item.values) for item in items]))


def raster(features: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Row order of units to frames of patches: [P, D] -> [t, h, w, D]."""
    _, h, w = grid
    positions = PatchLayout.of([(1, h, w)], 2, features.device).positions  # [h * w, 2]
    order = (positions[:, 0] * w + positions[:, 1]).argsort()
    frames = features.view(-1, h * w, features.shape[-1])
    return frames[:, order].view(-1, h, w, features.shape[-1])


class VisionStage:
    name = "vision"

    def __init__(
        self,
        tower: VisionTower,
        corpus: Corpus,
        recipe: Recipe,
        seed: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self.steps = recipe.vision_steps
        self.tower, self._corpus, self._recipe, self._seed = tower, corpus, recipe, seed
        self._ranks = ranks
        self._heads = Heads(tower.config.hidden_size)
        initialise(self._heads, f"{seed}/vision heads")
        self._patcher = Patcher(tower.config)
        self._processor = processor_config()
        named = [
            *((f"tower.{n}", p) for n, p in tower.named_parameters() if "merger" not in n),
            *((f"heads.{n}", p) for n, p in self._heads.named_parameters()),
        ]
        self._optimizer = Optimizer(named, ranks, muon_lr=recipe.vision_lr, adam_lr=_ADAM_LR)

    def step(self, index: int) -> dict[str, float]:
        rng = stream(self._seed, self.name, index, self._ranks.rank)
        drawn = {
            kind: self._draw(self._corpus[kind, TRAIN], count, rng)
            for kind, count in zip(KINDS, self._recipe.vision_batch, strict=True)
        }
        losses = self._losses(drawn)
        weights = {"shapes": 1.0, "texts": 1.0, "digits": _DIGIT_WEIGHT, "videos": _VIDEO_WEIGHT}
        torch.stack([weights[kind] * loss for kind, loss in losses.items()]).sum().backward()
        self._optimizer.step(schedule(index, self.steps, hold=_HOLD))
        return {kind: loss.item() for kind, loss in losses.items()}

    def state(self) -> dict[str, Tensor]:
        optimizer = {f"optimizer.{n}": t for n, t in self._optimizer.state().items()}
        return module_state(self._modules) | optimizer

    def load(self, state: Mapping[str, Tensor]) -> None:
        load_modules(self._modules, state)
        self._optimizer.load(part(state, "optimizer"))

    @property
    def _modules(self) -> dict[str, nn.Module]:
        return {"tower": self.tower, "heads": self._heads}

    @torch.inference_mode()
    def measure(self) -> dict[str, float]:
        """Held-out accuracy: shapes by patch that shows one, texts and digits whole, motion."""
        return {
            "patches": self._accuracy("shapes", HELD_OUT),
            "reading": self._accuracy("texts", HELD_OUT),
            "reading, unseen fonts": self._accuracy("texts", UNSEEN),
            "digits": self._accuracy("digits", HELD_OUT),
            "motion": self._accuracy("videos", HELD_OUT),
        }

    def _draw(self, data: DataSet, count: int, rng: random.Random) -> "_Samples":
        return self._samples(data, [rng.randrange(len(data)) for _ in range(count)])

    def _samples(self, data: DataSet, indices: Sequence[int]) -> "_Samples":
        facts = [data.facts[index] for index in indices]
        items = []
        for index, fact in zip(indices, facts, strict=True):
            pixels = data.arrays[index]
            if "change" in fact:
                plan = video_plan(pixels.shape, fact, None, self._processor)
                items.append(self._patcher(pixels, plan))
            else:
                items.append(self._patcher(pixels, picture_plan(pixels.shape, self._processor)))
        return _Samples(facts, items)

    def _losses(self, drawn: "Mapping[str, _Samples]") -> dict[str, Tensor]:
        everything = [item for samples in drawn.values() for item in samples.items]
        features = iter(patch_features(self.tower, everything))
        losses = {}
        for kind, samples in drawn.items():
            frames = [raster(next(features), item.grid) for item in samples.items]
            losses[kind] = self._loss(kind, samples, frames)
        return losses

    def _loss(self, kind: str, samples: "_Samples", frames: list[Tensor]) -> Tensor:
        match kind:
            case "shapes" | "videos":
                patches = torch.cat([x.flatten(0, 2) for x in frames])  # [sum of P, D]
                loss = torch.zeros(())
                for head, labels in zip(("first", "second"), samples.labels(), strict=True):
                    loss = loss + F.cross_entropy(self._heads[head](patches), labels) / 2
                if kind == "videos":
                    pooled = torch.cat([x.mean(dim=(1, 2)) for x in frames])  # [grids, D]
                    loss = loss + F.cross_entropy(self._heads["motion"](pooled), samples.motion())
                return loss
            case "texts":
                return ctc_loss(self._letters(frames), samples.texts())
        return F.cross_entropy(self._digits(frames), samples.digits())

    def _letters(self, frames: list[Tensor]) -> list[Tensor]:
        """[1, h, w, D] each -> logits over columns, [w, 1 + letters] each."""
        head = self._heads["letters"]
        by_size: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, frame in enumerate(frames):
            by_size[tuple(frame.shape)].append(index)
        logits: list[Tensor] = [torch.empty(0)] * len(frames)
        for members in by_size.values():
            columns = torch.stack([frames[index][0] for index in members]).mean(dim=1)  # [n, w, D]
            for index, line in zip(members, head(columns), strict=True):
                logits[index] = line
        return logits

    def _digits(self, frames: list[Tensor]) -> Tensor:
        logits: Tensor = self._heads["digit"](torch.stack([x.mean(dim=(0, 1, 2)) for x in frames]))
        return logits

    def _accuracy(self, kind: str, split: str) -> float:
        data = self._corpus[kind, split]
        right = total = 0
        for start in range(0, min(len(data), self._recipe.checked), 50):
            stop = min(start + 50, len(data), self._recipe.checked)
            samples = self._samples(data, range(start, stop))
            features = patch_features(self.tower, samples.items)
            frames = [raster(x, i.grid) for x, i in zip(features, samples.items, strict=True)]
            hits = self._hits(kind, samples, frames)
            right, total = right + int(hits.sum()), total + len(hits)
        return right / max(1, total)

    def _hits(self, kind: str, samples: "_Samples", frames: list[Tensor]) -> Tensor:
        match kind:
            case "shapes":
                labels, _ = samples.labels()
                patches = torch.cat([x.flatten(0, 2) for x in frames])
                return (self._heads["first"](patches).argmax(dim=-1) == labels)[labels > 0]
            case "videos":
                pooled = torch.cat([x.mean(dim=(1, 2)) for x in frames])
                return self._heads["motion"](pooled).argmax(dim=-1) == samples.motion()
            case "texts":
                read = [ctc_decode(logits) for logits in self._letters(frames)]
                hits = [a == b for a, b in zip(read, samples.texts(), strict=True)]
                return torch.tensor(hits)
        return self._digits(frames).argmax(dim=-1) == samples.digits()


class _Samples:
    """Samples of one kind with what the heads should say about them."""

    def __init__(self, facts: list[dict[str, object]], items: list[Patches]) -> None:
        self._facts = facts
        self.items = items

    def labels(self) -> tuple[Tensor, Tensor]:
        """Shape of every patch in the first and second frame of its pair: [sum of P] each."""
        first, second = [], []
        for facts, item in zip(self._facts, self.items, strict=True):
            t, h, w = item.grid
            if "change" not in facts:
                still = torch.from_numpy(patch_labels(scene_of(facts).shapes, h, w)).flatten()
                first.append(still)
                second.append(still)
                continue
            _, shapes = clip_of(facts)
            shapes = [*shapes, shapes[-1]][: 2 * t]  # an odd last frame counts twice
            moments = [torch.from_numpy(patch_labels((s,), h, w)).flatten() for s in shapes]
            first += moments[0::2]
            second += moments[1::2]
        return torch.cat(first), torch.cat(second)

    def motion(self) -> Tensor:
        """Direction of every pair of frames, 0 for none: [sum of grids]."""
        names = list(DIRECTIONS)
        classes = []
        for facts, item in zip(self._facts, self.items, strict=True):
            change, _ = clip_of(facts)
            classes += [1 + names.index(change) if change in names else 0] * item.grid[0]
        return torch.tensor(classes)

    def texts(self) -> list[list[int]]:
        return [[ALPHABET.index(c) for c in str(facts["text"])] for facts in self._facts]

    def digits(self) -> Tensor:
        return torch.tensor([facts["digit"] for facts in self._facts])
