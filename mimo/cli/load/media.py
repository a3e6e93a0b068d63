"""Media for load, drawn at random but the same for the same seed, and cheap to make."""

import io
import struct
import wave
import zlib
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE = 24_000
FPS = 4

Pixels = NDArray[np.uint8]


def picture(seed: int, side: int) -> bytes:
    """A PNG of ``side`` x ``side`` pixels: coarse coloured blocks, as compressible as a photo."""
    pixels = _blocks(np.random.default_rng(seed), side)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # each with filter "none"
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(*chunk) for chunk in chunks)


def sound(seed: int, seconds: float) -> bytes:
    """A mono WAV of 16-bit noise."""
    noise = np.random.default_rng(seed).normal(0.0, 3000.0, round(seconds * SAMPLE_RATE))
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setnchannels(1)
        output.setsampwidth(2)
        output.setframerate(SAMPLE_RATE)
        output.writeframes(noise.clip(-32768, 32767).astype("<i2").tobytes())
    return file.getvalue()


def video(seed: int, side: int, seconds: float) -> bytes:
    """A silent MP4 (H.264) of four frames a second, at least one. Odd sides lose a pixel."""
    chance, side = np.random.default_rng(seed), side // 2 * 2
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        options = {"preset": "ultrafast", "x264-params": "log-level=none"}
        stream = output.add_stream("libx264", rate=FPS, options=options)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1  # the same bytes everywhere
        for number in range(max(1, round(seconds * FPS))):
            frame = av.VideoFrame.from_ndarray(_blocks(chance, side), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def _blocks(chance: np.random.Generator, side: int) -> Pixels:
    """Blocks of 8 x 8 pixels in random colours, [side, side, 3]."""
    coarse = chance.integers(0, 256, (-(-side // 8), -(-side // 8), 3), dtype=np.uint8)
    return coarse.repeat(8, axis=0).repeat(8, axis=1)[:side, :side]


def _png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
