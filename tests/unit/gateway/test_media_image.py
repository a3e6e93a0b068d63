"""Pictures: equal pixels whatever the file, and every bomb refused from its header."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from gateway.media.facts import ImageFacts
from gateway.media.image import count_scans, decode_image, probe_image
from gateway.media.limits import Limits
from gateway.media.orientation import orientation_of_matrix, turn
from gateway.media.sniff import sniff
from mimo.errors import InvalidRequest, Reason
from mimo.store.keys import content_digest_image
from tests.support.media import gradient, image_file, with_orientation

LIMITS = Limits()


def probe(data: bytes, *, exif: bool = True, limits: Limits = LIMITS) -> ImageFacts:
    return probe_image(data, sniff(data), exif=exif, limits=limits)


def decode(data: bytes, limits: Limits = LIMITS) -> NDArray[np.uint8]:
    facts = probe(data, limits=limits)
    size = (facts.height, facts.width)
    if facts.orientation >= 5:
        size = size[::-1]
    return decode_image(data, sniff(data), orientation=facts.orientation, size=size, limits=limits)


def refused(data: bytes, limits: Limits = LIMITS) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(data, limits)
    return caught.value


@pytest.mark.parametrize(
    ("format", "options"),
    [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True})],
)
def test_equal_pixels_share_a_digest(format: str, options: dict[str, Any]) -> None:
    pixels = gradient(30, 50)
    decoded = decode(image_file(pixels, format, **options))
    assert np.array_equal(decoded, pixels)
    assert content_digest_image(decoded) == content_digest_image(pixels)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(format: str, orientation: int) -> None:
    stored = gradient(16, 32)
    options = {"lossless": True} if format == "WEBP" else {}
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = image_file(stored, format, exif=exif, **options)
    upright = {
        1: stored,
        2: np.fliplr(stored),
        3: np.rot90(stored, 2),
        4: np.flipud(stored),
        5: stored.swapaxes(0, 1),
        6: np.rot90(stored, -1),
        7: np.rot90(stored, 2).swapaxes(0, 1),
        8: np.rot90(stored, 1),
    }[orientation]
    facts = probe(data)
    sides = (facts.height, facts.width)
    assert (sides[::-1] if facts.orientation >= 5 else sides) == upright.shape[:2]
    assert np.array_equal(decode(data), upright)


def test_exif_can_be_ignored_and_garbage_is_harmless() -> None:
    assert probe(with_orientation(gradient(16, 32), 6, "JPEG")).orientation == 6
    assert probe(with_orientation(gradient(16, 32), 6, "JPEG"), exif=False).orientation == 1
    assert probe(with_orientation(gradient(16, 32), 9)).orientation == 1
    assert probe(image_file(gradient(16, 32), "JPEG", exif=b"Exif\0\0garbage")).orientation == 1


def test_transparency_shows_white() -> None:
    pixels = np.dstack([gradient(8, 8), np.zeros((8, 8), np.uint8)])
    pixels[:4, :, 3] = 255
    decoded = decode(image_file(pixels))
    assert np.array_equal(decoded[:4], pixels[:4, :, :3])
    assert (decoded[4:] == 255).all()


def test_transparent_palette_grey_and_rgb_colours() -> None:
    palette = Image.fromarray(gradient(8, 8)).quantize(4)
    palette.putpixel((0, 0), 3)
    for image in (palette, Image.new("L", (8, 8), 3), Image.new("RGB", (8, 8), (3, 3, 3))):
        key: Any = (3, 3, 3) if image.mode == "RGB" else 3
        buffer = io.BytesIO()
        image.save(buffer, "PNG", transparency=key)
        assert decode(buffer.getvalue())[0, 0].tolist() == [255, 255, 255]


def test_sixteen_bit_grey_keeps_its_high_byte() -> None:
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    decoded = decode(image_file(ramp))
    assert np.array_equal(decoded, np.repeat((ramp >> 8).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(mode: str) -> None:
    buffer = io.BytesIO()
    format = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    Image.fromarray(gradient(8, 8)).convert(mode).save(buffer, format)
    assert decode(buffer.getvalue()).shape == (8, 8, 3)


def test_pixels_without_a_range_are_refused() -> None:
    data = image_file(np.ones((8, 8), np.float32), "TIFF")
    assert refused(data).reason == Reason.MEDIA_UNSUPPORTED


def test_the_first_frame_of_an_animation() -> None:
    first, second = (Image.new("RGB", (8, 8), colour) for colour in ((250, 0, 0), (0, 250, 0)))
    for format in ("GIF", "PNG", "WEBP"):
        buffer = io.BytesIO()
        first.save(buffer, format, save_all=True, append_images=[second])
        red, green, _ = decode(buffer.getvalue())[4, 4].tolist()
        assert red > 200 > 50 > green


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_truncated_files_are_corrupt(format: str, kept: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    data = image_file(noise, format)
    assert refused(data[: int(len(data) * kept)]).reason == Reason.MEDIA_CORRUPT


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF"])
def test_damaged_files_decode_or_are_refused(format: str) -> None:
    """Whatever bytes are turned over, nothing but InvalidRequest comes out."""
    data = image_file(gradient(40, 40), format)
    rng = np.random.default_rng(1)
    for _ in range(60):
        damaged = bytearray(data)
        for position in rng.integers(12, len(data), 4):
            damaged[position] = rng.integers(0, 256)
        try:
            decode(bytes(damaged), Limits(max_image_pixels=1_000_000))
        except InvalidRequest as error:
            assert error.reason.startswith("MEDIA_")


def test_limits_are_checked_before_pixels() -> None:
    data = image_file(gradient(20, 30))
    assert refused(data, Limits(max_image_pixels=599)).metadata["which"] == "pixels"
    assert refused(data, Limits(max_image_pixels=200)).reason == Reason.MEDIA_LIMIT
    assert refused(data, Limits(max_image_side=29)).metadata["which"] == "side"
    assert refused(image_file(gradient(2, 402))).metadata["which"] == "aspect"
    assert decode(image_file(gradient(2, 400))).shape == (2, 400, 3)


def test_bombs_are_refused_from_their_headers() -> None:
    gif = b"GIF89a" + struct.pack("<HHBBB", 9000, 9000, 0x80, 0, 0) + bytes(6)
    gif += b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00;"
    assert refused(gif).metadata["which"] == "pixels"
    giant = gif.replace(struct.pack("<HH", 9000, 9000), struct.pack("<HH", 65535, 65535))
    assert refused(giant).metadata["which"] == "pixels"
    assert refused(png_header(60000, 3000)).metadata["which"] == "pixels"
    assert refused(png_header(50000, 50000)).metadata["which"] == "pixels"
    bmp = bytearray(image_file(gradient(4, 4), "BMP"))
    bmp[18:26] = struct.pack("<ii", 100_000, 100_000)
    assert refused(bytes(bmp)).metadata["which"] == "pixels"


def test_text_chunks_do_not_explode() -> None:
    bomb = png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(8_000_000), 9))
    data = image_file(gradient(8, 8))
    assert refused(data[:33] + bomb + data[33:]).reason == Reason.MEDIA_CORRUPT


def test_a_jpeg_of_too_many_scans_is_refused() -> None:
    data = image_file(gradient(64, 64), "JPEG", progressive=True)
    scans = count_scans(data, stop_after=1000)
    assert 2 <= scans <= 20
    assert decode(data).shape == (64, 64, 3)
    last = data.rindex(b"\xff\xda")
    bomb = data[:-2] + data[last:-2] * 100 + data[-2:]
    assert count_scans(bomb, stop_after=1000) == scans + 100
    assert refused(bomb).metadata["which"] == "scans"
    assert refused(data, Limits(max_jpeg_scan_pixels=64 * 64)).metadata["which"] == "scan_pixels"


def test_thumbnails_are_not_scans() -> None:
    thumbnail = image_file(gradient(16, 16), "JPEG", progressive=True)
    exif = b"Exif\0\0" + thumbnail * 3
    data = image_file(gradient(16, 16), "JPEG", exif=exif)
    assert count_scans(data, stop_after=1000) == 1


def test_zero_sized_pictures_are_refused() -> None:
    assert refused(png_header(0, 8)).reason in (Reason.MEDIA_EMPTY, Reason.MEDIA_CORRUPT)


def test_pixels_must_be_those_of_the_plan() -> None:
    data = image_file(gradient(8, 16))
    with pytest.raises(InvalidRequest) as caught:
        decode_image(data, sniff(data), orientation=1, size=(16, 8), limits=LIMITS)
    assert caught.value.reason == Reason.MEDIA_CORRUPT


@pytest.mark.parametrize("orientation", range(1, 9))
def test_display_matrices_are_orientations(orientation: int) -> None:
    """The matrix that maps stored points to where ``turn`` puts them."""
    matrix = {
        1: (1, 0, 0, 1),
        2: (-1, 0, 0, 1),
        3: (-1, 0, 0, -1),
        4: (1, 0, 0, -1),
        5: (0, 1, 1, 0),
        6: (0, 1, -1, 0),
        7: (0, -1, -1, 0),
        8: (0, -1, 1, 0),
    }[orientation]
    a, b, c, d = (value << 16 for value in matrix)
    packed = struct.pack("=9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    assert orientation_of_matrix(packed) == orientation
    mark = np.zeros((3, 5, 1), np.uint8)
    mark[0, 4] = (
        1  # the top right corner: x' and y' have the signs of the matrix applied to (1, -1)
    )
    turned = turn(mark, orientation)[..., 0]
    right, down = matrix[0] - matrix[2] > 0, matrix[1] - matrix[3] > 0
    assert turned[-1 if down else 0, -1 if right else 0] == 1


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width: int, height: int) -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(bytes(100)))
