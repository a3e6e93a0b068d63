"""Stage A, sounds: the audio tokenizer learns to keep what is said, then to say it in codes.

First the encoder alone, by CTC over words and by reconstructing its input; then k-means codebooks;
then encoder, codebooks and heads together, through the quantiser.
"""

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.training.corpus import HELD_OUT, TRAIN, UNSEEN, Corpus
from models.training.ctc import ctc_decode, ctc_loss
from models.training.draw import stream
from models.training.networks import initialise
from models.training.optimizer import Optimizer, schedule
from models.training.parallel import Ranks
from models.training.quantiser import CodebookFollower, dequantise, straight_through
from models.training.ragged import Ragged
from models.training.settings import Recipe
from models.training.state import load_modules, module_state, part
from models.training.synth.sound import WORDS
from services.audio.segments import Segment
from services.audio.tokenizer import AudioTokenizer

_ADAM_LR = 2e-3
_RECONSTRUCTION = 0.2
_QUANTISED_SHARE = 0.15  # of the learning rates, once codebooks exist
_POOL = 256  # neighbours in length that a batch is drawn from

# Augmentation, in log-mel: level, a band and a moment painted over.
_MASK = -8.0
_MEAN, _SPREAD = -7.0, 4.0


class Heads(nn.ModuleDict):
    """What the tokenizer is asked while it learns."""

    def __init__(self, width: int, num_mels: int) -> None:
        super().__init__(
            {
                "words": nn.Linear(width, 1 + len(WORDS)),
                "mel": nn.Linear(width, num_mels),  # mean of a code's frames
            }
        )


class AudioStage:
    """``quantised`` trains through the codebooks, which must have been filled."""

    def __init__(
        self,
        tokenizer: AudioTokenizer,
        mels: Mapping[str, Ragged],
        corpus: Corpus,
        recipe: Recipe,
        seed: int,
        ranks: Ranks,
        *,
        quantised: bool,
    ) -> None:
        self.name = "codes" if quantised else "audio"
        self.steps = recipe.quantised_steps if quantised else recipe.audio_steps
        self.tokenizer, self._recipe, self._seed, self._ranks = tokenizer, recipe, seed, ranks
        self._mels, self._corpus, self._quantised = mels, corpus, quantised
        self._heads = Heads(tokenizer.config.d_model, tokenizer.config.n_mels)
        initialise(self._heads, f"{seed}/audio heads")
        clips = range(len(mels[TRAIN]))
        self._by_length = sorted(clips, key=mels[TRAIN].shape)
        named = [
            *((f"tokenizer.{n}", p) for n, p in tokenizer.named_parameters()),
            *((f"heads.{n}", p) for n, p in self._heads.named_parameters()),
        ]
        share = _QUANTISED_SHARE if quantised else 1.0
        self._optimizer = Optimizer(
            named, ranks, muon_lr=share * recipe.audio_lr, adam_lr=share * _ADAM_LR
        )
        self._follower = CodebookFollower(tokenizer.quantizer)

    def step(self, index: int) -> dict[str, float]:
        rng = stream(self._seed, self.name, index, self._ranks.rank)
        pool = rng.randrange(max(1, len(self._by_length) - _POOL + 1))
        near = self._by_length[pool : pool + _POOL]
        chosen = rng.sample(near, min(self._recipe.audio_batch, len(near)))
        mels = [augment(torch.from_numpy(self._mels[TRAIN][i].astype("float32")), rng)
                for i in chosen]  # fmt: skip
        if rng.random() < 0.75:
            mels = _level(mels)
        features, commitment = self._features(mels)
        words = ctc_loss([self._heads["words"](x) for x in features], self._words(TRAIN, chosen))
        target = torch.cat([_code_means(mel) for mel in mels])
        mel_loss = F.mse_loss(self._heads["mel"](torch.cat(features)), target)
        loss = words + _RECONSTRUCTION * mel_loss + commitment
        loss.backward()
        self._optimizer.step(schedule(index, self.steps, hold=0.0 if self._quantised else 0.5))
        return {"words": words.item(), "mel": mel_loss.item()}

    def _features(self, mels: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Features of each clip, [codes, D] each, and what keeps them near their codes."""
        segments = [Segment(len(mel)) for mel in mels]
        features = self.tokenizer(torch.cat(list(mels)), segments)  # [sum of codes, D]
        commitment = torch.zeros(())
        if self._quantised:
            self._follower.follow(features, self._ranks)
            features, commitment = straight_through(self.tokenizer.quantizer, features)
        return list(features.split([segment.num_codes for segment in segments])), commitment

    def _words(self, split: str, indices: Sequence[int]) -> list[list[int]]:
        facts = self._corpus["sounds", split].facts
        return [[WORDS.index(word) for word in facts[index]["words"]] for index in indices]

    def state(self) -> dict[str, Tensor]:
        parts = {"optimizer": self._optimizer.state(), "follower": self._follower.state()}
        flat = {f"{kind}.{n}": t for kind, tensors in parts.items() for n, t in tensors.items()}
        return module_state(self._modules) | flat

    def load(self, state: Mapping[str, Tensor]) -> None:
        load_modules(self._modules, state)
        self._optimizer.load(part(state, "optimizer"))
        self._follower.load(part(state, "follower"))

    def take_over(self, state: Mapping[str, Tensor]) -> None:
        """Begin with the heads of the stage before."""
        load_modules({"heads": self._heads}, state)

    @property
    def _modules(self) -> dict[str, nn.Module]:
        return {"tokenizer": self.tokenizer, "heads": self._heads}

    @torch.no_grad()
    def features(self, count: int) -> Tensor:
        """Features of the first ``count`` training clips, before quantisation. -> [T, D]."""
        mels = [torch.from_numpy(mel.astype("float32")) for mel, _ in
                zip(self._mels[TRAIN], range(count), strict=False)]  # fmt: skip
        parts = [self.tokenizer(mel, [Segment(len(mel))]) for mel in mels]
        return torch.cat(parts)

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Share of held-out clips whose words come out all right, by voices known and unknown."""
        return {"words": self._accuracy(HELD_OUT), "words, unseen voices": self._accuracy(UNSEEN)}

    def _accuracy(self, split: str) -> float:
        count = min(len(self._mels[split]), self._recipe.checked)
        targets = self._words(split, range(count))
        right = 0
        for index, target in enumerate(targets):
            mel = torch.from_numpy(self._mels[split][index].astype("float32"))
            features = self.tokenizer(mel, [Segment(len(mel))])
            if self._quantised:
                quantiser = self.tokenizer.quantizer
                features = dequantise(quantiser, quantiser.encode(features))
            right += ctc_decode(self._heads["words"](features)) == target
        return right / max(1, count)


def augment(mel: Tensor, rng: random.Random) -> Tensor:
    """Another level; often a band, sometimes a moment painted over. [F, mels] -> same."""
    mel = mel + rng.uniform(-1, 1)
    if rng.random() < 0.5:
        band = rng.randrange(mel.shape[1] - 18)
        mel[:, band : band + rng.randint(1, 13)] = _MASK
    if rng.random() < 0.3:
        moment = rng.randrange(max(1, len(mel) - 8))
        mel[moment : moment + 6] = _MASK
    return mel


def _level(mels: Sequence[Tensor]) -> list[Tensor]:
    """Clips of one length, by holding the last frame: equal lengths share attention calls."""
    longest = max(map(len, mels))
    return [torch.cat([mel, mel[-1:].expand(longest - len(mel), -1)]) for mel in mels]


def _code_means(mel: Tensor) -> Tensor:
    """Normalised mean of the frames behind each code. [F, mels] -> [codes, mels]."""
    codes = Segment(len(mel)).num_codes
    missing = 4 * codes - len(mel)
    frames = torch.cat([mel, mel[-1:].expand(missing, -1)]).view(codes, 4, -1)
    return (frames.mean(dim=1) - _MEAN) / _SPREAD
