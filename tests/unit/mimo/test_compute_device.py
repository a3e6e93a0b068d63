"""Device and dtype from what the operator asked for."""

import pytest
import torch

from mimo.errors import ConfigError
from mimo.nn.device import Compute


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)


@pytest.mark.parametrize(
    ("gpu", "device", "dtype", "expected"),
    [
        (False, "auto", "auto", Compute("cpu", "float32")),
        (True, "auto", "auto", Compute("cuda", "bfloat16")),
        (True, "cpu", "bfloat16", Compute("cpu", "bfloat16")),
        (True, "cuda:1", "float32", Compute("cuda:1", "float32")),
    ],
    indirect=["gpu"],
)
@pytest.mark.usefixtures("gpu")
def test_resolved(device: str, dtype: str, expected: Compute) -> None:
    assert Compute.resolve(device, dtype) == expected


@pytest.mark.parametrize(
    ("gpu", "device", "dtype", "named"),
    [
        (False, "cuda", "auto", "no GPU"),
        (True, "tpu", "auto", "--device"),
        (True, "auto", "float16", "--dtype"),
    ],
    indirect=["gpu"],
)
@pytest.mark.usefixtures("gpu")
def test_refused(device: str, dtype: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Compute.resolve(device, dtype)


def test_number_of_a_gpu_is_not_its_type() -> None:
    compute = Compute("cuda:1", "bfloat16")
    assert compute.device_type == "cuda"
    assert compute.dtype is torch.bfloat16
