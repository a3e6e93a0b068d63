"""The kernels compiled for lesser CPUs than this one: other registers, the same sums."""

import platform
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from mimo.nn import native, panels
from mimo.nn.attention import Sink
from mimo.nn.attention import native as attention
from mimo.nn.panels import Panels
from services.llm.model import expert_panels
from services.llm.model.moe import Experts
from tests.support.attention_cases import TOLERANCES, dense, into_blocks, make_case
from tests.support.kernels import needs_panels

pytestmark = [
    needs_panels,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="names instructions of x86"),
]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def forget() -> None:
    for cached in (native.load_kernel, attention._kernel, panels._kernel, expert_panels._kernel):
        cached.cache_clear()


@pytest.fixture(params=["x86-64", "x86-64-v3"], autouse=True)  # SSE2, AVX2
def instructions(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    march = f"-march={request.param}"
    flags = tuple(march if flag == "-march=native" else flag for flag in native._FLAGS)
    assert march in flags
    monkeypatch.setattr(native, "_FLAGS", flags)
    monkeypatch.setenv("HOME", str(tmp_path_factory.getbasetemp() / request.param))
    forget()
    yield
    forget()


@each_dtype
def test_attention(dtype: torch.dtype) -> None:
    case = make_case("causal window", Sink.COLUMN, (7, 1, 48, 80), dtype, paged=True)
    out = attention.NativeBackend().paged(case.needs, case.q, *into_blocks(case), case.sinks)
    assert np.abs(out.double().numpy() - dense(case)).max() < TOLERANCES[dtype]


@each_dtype
def test_linear_maps(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(200, 96).to(dtype), torch.randn(9, 96).to(dtype)
    expected = x.double() @ weight.double().T
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    actual = Panels(weight).product(x).double()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@each_dtype
def test_experts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts = Experts(8, 96, 48, std=0.1, gather_max_pairs=0, dtype=dtype)
    x, ids, weights = torch.randn(9, 96).to(dtype), torch.randint(8, (9, 3)), torch.rand(9, 3)
    with torch.inference_mode():
        expected = experts(x, ids, weights)
        experts.pack(Panels)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            experts(x, ids, weights), expected, rtol=tolerance, atol=tolerance
        )
