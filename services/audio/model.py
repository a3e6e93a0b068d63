"""The whole audio stack: waveforms of any lengths to embeddings, packed for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from services.audio.embedder import CodeEmbedder
from services.audio.mel import LogMel
from services.audio.segments import passes, plan_segments
from services.audio.tokenizer import AudioTokenizer

PASS_FRAMES = 48_000  # mel frames per forward, 8 minutes of sound; bounds activation memory


class AudioTower(nn.Module):
    """Mel, codes and embeddings of a batch of clips. Clips never influence each other."""

    def __init__(self, mel: LogMel, tokenizer: AudioTokenizer, embedder: CodeEmbedder) -> None:
        super().__init__()
        self.mel = mel
        self.tokenizer = tokenizer
        self.embedder = embedder

    def forward(self, waveforms: Sequence[Tensor]) -> list[Tensor]:
        """Embeddings of each clip. waveforms: [samples] float32 each -> [ceil(F / 16), hidden]."""
        return self.embed(self.tokenize(waveforms))

    def tokenize(self, waveforms: Sequence[Tensor]) -> list[Tensor]:
        """Codes of each clip, of the codebooks the embedder uses.

        waveforms: [samples] float32 each, not empty -> [ceil(F / 4), C] int64
        """
        config = self.embedder.config
        mels = [self.mel(waveform) for waveform in waveforms]  # each [F, mels]
        clips = [plan_segments(len(mel), config.audio_segment_size) for mel in mels]
        frames = torch.cat(mels)  # [sum of F, mels]
        codes = []
        start = 0
        for run in passes([segment for clip in clips for segment in clip], PASS_FRAMES):
            end = start + sum(segment.num_frames for segment in run)
            codes.append(self.tokenizer.tokenize(frames[start:end], run, config.audio_channels))
            start = end
        lengths = [sum(segment.num_codes for segment in clip) for clip in clips]
        return list(torch.split(torch.cat(codes), lengths))

    def embed(self, codes: Sequence[Tensor]) -> list[Tensor]:
        """Embeddings of each clip. codes: [frames, C] each -> [ceil(frames / 4), hidden]."""
        lengths = [len(clip) for clip in codes]
        size = self.embedder.config.group_size
        rows = self.embedder(torch.cat(list(codes)), lengths)  # [G, hidden]
        return list(torch.split(rows, [-(-length // size) for length in lengths]))
