"""What a file is, from its first bytes. Names and declared types are never believed.

Only formats of the list below are ever opened, each by one named decoder; text that a decoder would
take for a playlist matches nothing here.
"""

from dataclasses import dataclass
from enum import Enum

from gateway.items import Modality
from mimo.errors import InvalidRequest, Reason


class Kind(Enum):
    """What a format can hold."""

    IMAGE = "image"
    AUDIO = "audio"
    CONTAINER = "container"  # pictures, sound or both


@dataclass(frozen=True, slots=True)
class Format:
    """A file format. ``opener`` is the one decoder that may read it: Pillow's or FFmpeg's name."""

    name: str
    kind: Kind
    opener: str


JPEG = Format("jpeg", Kind.IMAGE, "JPEG")
PNG = Format("png", Kind.IMAGE, "PNG")
GIF = Format("gif", Kind.IMAGE, "GIF")
WEBP = Format("webp", Kind.IMAGE, "WEBP")
BMP = Format("bmp", Kind.IMAGE, "BMP")
TIFF = Format("tiff", Kind.IMAGE, "TIFF")
AVIF = Format("avif", Kind.IMAGE, "AVIF")
WAV = Format("wav", Kind.AUDIO, "wav")
AIFF = Format("aiff", Kind.AUDIO, "aiff")
FLAC = Format("flac", Kind.AUDIO, "flac")
MP3 = Format("mp3", Kind.AUDIO, "mp3")
AAC = Format("aac", Kind.AUDIO, "aac")
OGG = Format("ogg", Kind.AUDIO, "ogg")
MP4 = Format("mp4", Kind.CONTAINER, "mov")
MATROSKA = Format("matroska", Kind.CONTAINER, "matroska")
AVI = Format("avi", Kind.CONTAINER, "avi")

FORMATS = {
    format.name: format
    for format in (
        *(JPEG, PNG, GIF, WEBP, BMP, TIFF, AVIF),
        *(WAV, AIFF, FLAC, MP3, AAC, OGG),
        *(MP4, MATROSKA, AVI),
    )
}

_PREFIXES = (
    (b"\xff\xd8\xff", JPEG),
    (b"\x89PNG\r\n\x1a\n", PNG),
    (b"GIF87a", GIF),
    (b"GIF89a", GIF),
    (b"BM", BMP),
    (b"II*\0", TIFF),
    (b"MM\0*", TIFF),
    (b"II+\0", TIFF),
    (b"MM\0+", TIFF),
    (b"fLaC", FLAC),
    (b"OggS", OGG),
    (b"\x1aE\xdf\xa3", MATROSKA),
)
_RIFF_FORMS = {b"WEBP": WEBP, b"WAVE": WAV, b"AVI ": AVI}
_MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_AVIF_BRANDS = (b"avif", b"avis")
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"miaf", b"msf1")

_ACCEPTED = {
    Modality.IMAGE: (Kind.IMAGE,),
    Modality.AUDIO: (Kind.AUDIO, Kind.CONTAINER),
    Modality.VIDEO: (Kind.CONTAINER,),
}


def sniff(data: bytes, expected: Modality | None = None) -> Format:
    """The format of a file that must hold ``expected`` (None: whatever it holds).

    Raises InvalidRequest: MEDIA_EMPTY for no bytes, MEDIA_UNSUPPORTED for an unknown or refused
    format, MEDIA_MODALITY for a known one of another kind.
    """
    if not data:
        raise InvalidRequest("media is empty (0 bytes)", reason=Reason.MEDIA_EMPTY)
    format = _recognise(data)
    if format is None:
        raise InvalidRequest(
            f"not a supported media format{_advice(data)}", reason=Reason.MEDIA_UNSUPPORTED
        )
    if expected is not None and format.kind not in _ACCEPTED[expected]:
        raise InvalidRequest(
            f"expected {expected.value}, got {format.kind.value} ({format.name})",
            reason=Reason.MEDIA_MODALITY,
        )
    return format


def default_modality(format: Format) -> Modality:
    """What a file is used as when the client does not say."""
    if format.kind is Kind.IMAGE:
        return Modality.IMAGE
    return Modality.AUDIO if format.kind is Kind.AUDIO else Modality.VIDEO


def _recognise(data: bytes) -> Format | None:
    for prefix, format in _PREFIXES:
        if data.startswith(prefix):
            return format
    if data[:4] in (b"RIFF", b"RF64"):
        return _RIFF_FORMS.get(data[8:12])
    if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"):
        return AIFF
    if data[4:8] in _MP4_BOXES:
        return _iso_media(data)
    return _elementary_audio(data)


def _iso_media(data: bytes) -> Format | None:
    """MP4 and its relatives. Image brands come first: FFmpeg would open those as a video."""
    if data[4:8] != b"ftyp":
        return MP4
    size = min(int.from_bytes(data[:4], "big"), 256)
    brands = [data[8:12]] + [data[at : at + 4] for at in range(16, size - 3, 4)]
    if brands[0] in _AVIF_BRANDS or (
        brands[0] in _HEIF_BRANDS and any(brand in _AVIF_BRANDS for brand in brands)
    ):
        return AVIF
    return None if brands[0] in _HEIF_BRANDS else MP4


def _elementary_audio(data: bytes) -> Format | None:
    """MP3 and AAC have no signature of their own: an ID3 tag or a plausible first frame header."""
    if data[:3] == b"ID3":
        body = data[_id3_size(data) :]
        if body[:4] == b"fLaC":
            return FLAC
        return AAC if _is_adts(body) else MP3
    if _is_adts(data):
        return AAC
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        version, layer = data[1] >> 3 & 3, data[1] >> 1 & 3
        if version != 1 and layer != 0:
            return MP3
    return None


def _is_adts(data: bytes) -> bool:
    return len(data) > 1 and data[0] == 0xFF and data[1] & 0xF6 == 0xF0


def _id3_size(data: bytes) -> int:
    """Bytes of the tag and its header; the length has 7 bits a byte."""
    if len(data) < 10:
        return len(data)
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size


def _advice(data: bytes) -> str:
    head = data[:256].lstrip().lower()
    if data[4:8] == b"ftyp":
        return ": HEIC pictures are not accepted; send JPEG or PNG"
    if data.startswith(b"%PDF"):
        return ": PDF; send its pages as images"
    if head.startswith((b"<svg", b"<?xml")):
        return ": SVG or XML; send PNG"
    if data.startswith((b"\xff\x0a", b"\0\0\0\x0cJXL ", b"\0\0\0\x0cjP  ")):
        return ": JPEG XL or JPEG 2000; send JPEG or PNG"
    return ""
