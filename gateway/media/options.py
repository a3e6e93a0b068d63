"""Media options as clients write them."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gateway.items import MediaOptions
from mimo.errors import InvalidRequest, Reason

_NAMES = tuple(field.name for field in fields(MediaOptions))
_COUNTS = ("min_pixels", "max_pixels", "total_max_pixels", "num_frames", "min_frames", "max_frames")
_MAX_FPS = 240.0


def parse_options(given: Mapping[str, Any], base: MediaOptions | None = None) -> MediaOptions:
    """Read a JSON object of options over ``base``. ``exif`` is "apply" or "ignore"; null is absent.

    Raises InvalidRequest naming the option. Giving ``fps`` replaces a ``num_frames`` of the base
    and the other way round.
    """
    values = {name: value for name, value in given.items() if value is not None}
    for name in values:
        if name not in _NAMES:
            raise InvalidRequest(
                f"unknown media option {name!r:.80}; known are {', '.join(_NAMES)}",
                reason=Reason.INVALID_VALUE,
            )
    for name in _COUNTS:
        if name in values:
            values[name] = _count(name, values[name])
    if "fps" in values and not isinstance(values["fps"], int | float):
        raise InvalidRequest("fps must be a number", reason=Reason.INVALID_TYPE)
    if "use_audio_track" in values and not isinstance(values["use_audio_track"], bool):
        raise InvalidRequest("use_audio_track must be a boolean", reason=Reason.INVALID_TYPE)
    if "exif" in values:
        if values["exif"] not in ("apply", "ignore"):
            raise InvalidRequest('exif must be "apply" or "ignore"', reason=Reason.INVALID_VALUE)
        values["exif"] = values["exif"] == "apply"
    base = base or MediaOptions()
    if "fps" in values:
        base = replace(base, num_frames=None)
    elif "num_frames" in values:
        base = replace(base, fps=None)
    options = replace(base, **values)
    check_options(options)
    return options


def check_options(options: MediaOptions) -> None:
    """Raises InvalidRequest for values out of range or contradicting each other."""
    for name in _COUNTS:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidRequest(f"{name} must be at least 1", reason=Reason.INVALID_VALUE)
    if options.fps is not None and not 0 < options.fps <= _MAX_FPS:
        raise InvalidRequest(
            f"fps must be above 0 and at most {_MAX_FPS:g}", reason=Reason.INVALID_VALUE
        )
    if options.fps is not None and options.num_frames is not None:
        raise InvalidRequest("fps and num_frames exclude each other", reason=Reason.INVALID_VALUE)
    for low, high in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
        least, most = getattr(options, low), getattr(options, high)
        if least is not None and most is not None and least > most:
            raise InvalidRequest(f"{low} is above {high}", reason=Reason.INVALID_VALUE)


def _count(name: str, value: Any) -> int:
    """A whole number, also when JSON spelled it 5.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a whole number", reason=Reason.INVALID_TYPE)
    if not math.isfinite(value) or value != int(value):
        raise InvalidRequest(f"{name} must be a whole number", reason=Reason.INVALID_TYPE)
    return int(value)
