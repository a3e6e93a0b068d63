"""Speech by eSpeak NG, called in this process: a clip takes about 20 ms."""

import ctypes
import ctypes.util
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mimo.errors import StartupError
from mimo.media.resample import resample

Samples = NDArray[np.float32]

# From speak_lib.h: output that returns at once through a callback, and parameter numbers.
_RETRIEVAL = 1
_BUFFER_MS = 200
_RATE, _VOLUME, _PITCH = 1, 2, 3
_CHARACTERS = 1  # position type; also the UTF-8 flag

_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


class Espeak:
    """The library of this process. Raises StartupError when it is not installed."""

    def __init__(self) -> None:
        name = ctypes.util.find_library("espeak-ng")
        if name is None:
            raise StartupError("speech needs eSpeak NG: apt-get install libespeak-ng1")
        self._library = ctypes.CDLL(name)
        self._pieces: list[NDArray[np.int16]] = []
        self._callback = _Callback(self._collect)  # kept alive: the library holds a bare pointer
        self._sample_rate = self._library.espeak_Initialize(_RETRIEVAL, _BUFFER_MS, None, 0)
        if self._sample_rate <= 0:
            raise StartupError("eSpeak NG does not start: is espeak-ng-data installed?")
        self._library.espeak_SetSynthCallback(self._callback)

    def _collect(self, samples: "ctypes._Pointer[ctypes.c_short]", count: int, _: int) -> int:
        if count > 0 and samples:
            self._pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def speak(
        self, text: str, *, voice: str, words_per_minute: int, pitch: int, sample_rate: int
    ) -> Samples:
        """Speech without the silence around it, -1..1. ``pitch`` is 0..99."""
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise StartupError(f"eSpeak NG has no voice {voice!r}")
        for parameter, value in ((_RATE, words_per_minute), (_PITCH, pitch), (_VOLUME, 100)):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._pieces.clear()
        content = text.encode()
        self._library.espeak_Synth(
            content, len(content) + 1, 0, _CHARACTERS, 0, _CHARACTERS, None, None
        )
        self._library.espeak_Synchronize()
        native = np.concatenate(self._pieces).astype(np.float32) / 32768
        samples = resample(native, self._sample_rate, sample_rate)
        loud = np.nonzero(np.abs(samples) > 0.01)[0]
        return samples[max(0, loud[0] - 480) : loud[-1] + 960]


@lru_cache(maxsize=1)
def espeak() -> Espeak:
    """The process's speaker; eSpeak NG can only be started once."""
    return Espeak()
