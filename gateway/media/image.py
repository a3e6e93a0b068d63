"""Pictures, by Pillow: size from the header, then pixels as 8-bit RGB. Runs in a media worker."""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from gateway.media.facts import ImageFacts
from gateway.media.faults import beyond, decoding
from gateway.media.limits import Limits
from gateway.media.orientation import UPRIGHT, turn
from gateway.media.sniff import JPEG, PNG, TIFF, Format
from mimo.errors import InvalidRequest, Reason

_WHITE = (255, 255, 255)

# Any JPEG marker but stuffing (FF 00), fill (FF FF) and restarts (FF D0..D7).
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9


def probe_image(data: bytes, format: Format, *, exif: bool, limits: Limits) -> ImageFacts:
    """Read size and orientation from the header and hold them against the limits."""
    with decoding("image"), _open(data, format, limits) as image:
        return ImageFacts(
            height=image.height,
            width=image.width,
            orientation=_orientation(image, data, format) if exif else UPRIGHT,
        )


def decode_image(
    data: bytes, format: Format, *, orientation: int, size: Sequence[int], limits: Limits
) -> NDArray[np.uint8]:
    """The first picture of the file, turned by ``orientation``, on white: uint8 [H, W, 3].

    ``size`` is the (height, width) that the header promised; other pixels are refused.
    """
    with decoding("image"), _open(data, format, limits) as image:
        image.seek(0)
        image.load()
        pixels = np.ascontiguousarray(turn(_to_rgb(image), orientation))
    if pixels.shape[:2] != tuple(size):
        raise InvalidRequest("image contradicts its header", reason=Reason.MEDIA_CORRUPT)
    return pixels


@contextmanager
def _open(data: bytes, format: Format, limits: Limits) -> Iterator[Image.Image]:
    """Open with the one decoder that fits and check the size before any pixel is decoded."""
    default_limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = limits.max_image_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=(format.opener,)) as image:
                _check_size(image, limits)
                if format is JPEG:
                    _check_scans(data, image.width * image.height, limits)
                yield image
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise beyond(
            "pixels",
            f"over {limits.max_image_pixels}",
            limits.max_image_pixels,
            f"image has more than {limits.max_image_pixels / 1e6:g} megapixels",
        ) from error
    finally:
        Image.MAX_IMAGE_PIXELS = default_limit


def _check_size(image: Image.Image, limits: Limits) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise InvalidRequest("image has no pixels", reason=Reason.MEDIA_EMPTY)
    if width * height > limits.max_image_pixels:
        raise beyond(
            "pixels",
            width * height,
            limits.max_image_pixels,
            f"image is {width * height / 1e6:.1f} megapixels; "
            f"the limit is {limits.max_image_pixels / 1e6:g}",
        )
    if max(width, height) > limits.max_image_side:
        raise beyond(
            "side",
            max(width, height),
            limits.max_image_side,
            f"image is {width}x{height}; the limit of a side is {limits.max_image_side}",
        )
    if max(width, height) > limits.max_image_aspect * min(width, height):
        raise beyond(
            "aspect",
            max(width, height) / min(width, height),
            limits.max_image_aspect,
            f"image is {width}x{height}; the limit of its aspect ratio is "
            f"{limits.max_image_aspect}:1",
        )


def _check_scans(data: bytes, num_pixels: int, limits: Limits) -> None:
    """A progressive JPEG may refine the same pixels hundreds of times in a few bytes each."""
    scans = count_scans(data, stop_after=limits.max_jpeg_scans)
    if scans > limits.max_jpeg_scans:
        raise beyond(
            "scans",
            scans,
            limits.max_jpeg_scans,
            f"JPEG has more than {limits.max_jpeg_scans} scans",
        )
    if scans * num_pixels > limits.max_jpeg_scan_pixels:
        raise beyond(
            "scan_pixels",
            scans * num_pixels,
            limits.max_jpeg_scan_pixels,
            f"JPEG has {scans} scans of {num_pixels / 1e6:.1f} megapixels; "
            f"the limit is {limits.max_jpeg_scan_pixels / 1e6:g} in all",
        )


def count_scans(data: bytes, *, stop_after: int) -> int:
    """Scans of a JPEG up to its end or the first ``stop_after + 1``, thumbnails left out.

    Segments are skipped by their length; entropy-coded data is searched for the next marker.
    """
    position, scans = 2, 0
    while scans <= stop_after:
        found = _MARKER.search(data, position)
        if found is None:
            break
        marker = data[found.start() + 1]
        if marker == _END_OF_IMAGE:
            break
        position = found.end()
        if marker in (0x01, 0xD8):  # stand-alone markers
            continue
        scans += marker == _START_OF_SCAN
        position += max(2, int.from_bytes(data[position : position + 2], "big"))
    return scans


def _orientation(image: Image.Image, data: bytes, format: Format) -> int:
    """EXIF's orientation, 1 for none or garbage."""
    if format is TIFF:
        return UPRIGHT  # Pillow turns TIFF itself
    if format is PNG and "exif" not in image.info and b"eXIf" not in data:
        return UPRIGHT  # asking Pillow would decode the whole picture
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:
        return UPRIGHT  # broken metadata does not spoil a picture
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else UPRIGHT


def _to_rgb(image: Image.Image) -> NDArray[Any]:
    """8-bit RGB [H, W, 3]. Sixteen-bit grey keeps its high byte, transparency shows white."""
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise InvalidRequest(
            f"image has pixels without a defined range (mode {image.mode})",
            reason=Reason.MEDIA_UNSUPPORTED,
        )
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        transparent = image if image.mode == "RGBA" else image.convert("RGBA")
        opaque = Image.new("RGB", image.size, _WHITE)
        opaque.paste(transparent, mask=transparent.getchannel("A"))
        return np.asarray(opaque)
    return np.asarray(image.convert("RGB"))
