"""What the frozen encoders make of the data sets, computed once.

Codes and patches are made with weights that are already rounded to bfloat16, that is exactly by the
encoders that will be served. Some clips have a second set of codes, made in bfloat16 arithmetic:
deep codebook levels differ there in one frame out of ten, and the decoder shall not mind.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from mimo.nn.attention import AttentionSelector
from models.training.corpus import SPLITS, TRAIN, Corpus, DataSet, processor_config
from models.training.media import Patcher, Patches, picture_plan, video_plan, waveform
from models.training.ragged import Ragged, write_ragged
from models.training.vision_stage import patch_features
from services.audio.mel import LogMel
from services.audio.segments import Segment
from services.audio.tokenizer import AudioTokenizer
from services.vision.model import VisionTower

PICTURES = ("shapes", "texts", "digits", "videos")
IN_BF16 = "train_bf16"  # the split of codes made in bfloat16: the first few training clips
_NUM_BF16 = 4_000

_BATCH = 64


def cache_mels(corpus: Corpus, mel: LogMel, folder: Path, progress: Progress) -> None:
    """Spectrograms of every clip: [F, mels] float16."""
    for split in SPLITS["sounds"]:
        sounds = corpus["sounds", split].arrays
        frames = (mel(waveform(samples)).numpy().astype(np.float16) for samples in sounds)
        _store(folder / "mels" / split, frames, len(sounds), progress)


def cache_codes(
    corpus: Corpus, tokenizer: AudioTokenizer, folder: Path, progress: Progress
) -> None:
    """Codes of every clip: [codes, C] uint8."""
    mel = LogMel(tokenizer.config)
    for split in SPLITS["sounds"]:
        sounds = corpus["sounds", split].arrays
        codes = _codes(tokenizer, mel, sounds, len(sounds))
        _store(folder / "codes" / split, codes, len(sounds), progress)
    narrow = AudioTokenizer(tokenizer.config, AttentionSelector("audio"), dtype=torch.bfloat16)
    narrow.load_state_dict(tokenizer.state_dict())
    narrow.bfloat16()
    for level, codebook in enumerate(tokenizer.quantizer.codebooks):
        narrow.quantizer.codebooks[level].data = codebook.detach().clone()  # stays in float32
    sounds = corpus["sounds", TRAIN].arrays
    count = min(_NUM_BF16, len(sounds))
    _store(folder / "codes" / IN_BF16, _codes(narrow, mel, sounds, count), count, progress)


@torch.no_grad()
def _codes(
    tokenizer: AudioTokenizer, mel: LogMel, sounds: Ragged, count: int
) -> Iterator[NDArray[np.uint8]]:
    for index in range(count):
        frames = mel(waveform(sounds[index]))
        yield tokenizer.tokenize(frames, [Segment(len(frames))]).numpy().astype(np.uint8)


def cache_patches(corpus: Corpus, tower: VisionTower, folder: Path, progress: Progress) -> None:
    """Patches of every picture and clip before the merger: [P, D] float16."""
    patcher = Patcher(tower.config)
    for name in PICTURES:
        for split in SPLITS[name]:
            data = corpus[name, split]
            patches = _patches(tower, patcher, data)
            _store(folder / "patches" / name / split, patches, len(data), progress)


@torch.no_grad()
def _patches(tower: VisionTower, patcher: Patcher, data: DataSet) -> Iterator[NDArray[np.float16]]:
    for start in range(0, len(data), _BATCH):
        stop = min(start + _BATCH, len(data))
        items = [read(data, index, patcher) for index in range(start, stop)]
        for features in patch_features(tower, items):
            yield features.numpy().astype(np.float16)


def read(data: DataSet, index: int, patcher: Patcher) -> Patches:
    """A picture or clip of a set as the tower takes it."""
    pixels, facts = data.arrays[index], data.facts[index]
    processor = processor_config()
    if "change" in facts:
        return patcher(pixels, video_plan(pixels.shape, facts, None, processor))
    return patcher(pixels, picture_plan(pixels.shape, processor))


def _store(
    folder: Path, arrays: Iterator[NDArray[np.generic]], count: int, progress: Progress
) -> None:
    if (folder / "shapes.npy").exists():
        return
    what = "/".join(folder.parts[-2:])
    write_ragged(folder, progress.track(arrays, count, description=what))
