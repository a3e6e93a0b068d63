"""Where to compute and in which dtype, from what the operator asked for."""

from dataclasses import dataclass

import torch

from mimo.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Compute:
    """A device, such as "cpu" or "cuda:1", and the dtype of weights and activations on it."""

    device: str
    dtype_name: str

    @classmethod
    def resolve(cls, device: str, dtype: str) -> "Compute":
        """Turn ``auto`` into the GPU if there is one, and into float32 on a CPU, where it is also
        the fastest, or bfloat16 elsewhere.

        float16 is refused: activations of the vision tower exceed its range. Raises ConfigError.
        """
        has_gpu = torch.cuda.is_available()
        if device == "auto":
            device = "cuda" if has_gpu else "cpu"
        kind = device.partition(":")[0]
        if kind not in ("cpu", "cuda"):
            raise ConfigError(f"--device: {device!r} is not auto, cpu, cuda or cuda:N")
        if kind == "cuda" and not has_gpu:
            raise ConfigError(f"--device: {device!r} was asked for, but torch sees no GPU")
        if dtype == "auto":
            dtype = "float32" if kind == "cpu" else "bfloat16"
        if dtype not in _DTYPES:
            raise ConfigError(f"--dtype: {dtype!r} is not auto, {' or '.join(_DTYPES)}")
        return cls(device, dtype)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype_name]

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda", without the number."""
        return self.device.partition(":")[0]
