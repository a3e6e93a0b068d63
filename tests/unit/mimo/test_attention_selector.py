"""The choice of an attention backend: overrides, reasons, probes and demotion."""

import logging
from dataclasses import replace

import pytest
import torch

from mimo.errors import ConfigError
from mimo.nn.attention import AttentionNeeds, AttentionSelector, Paged, Sink, Varlen, registry
from mimo.nn.attention.reference import ReferenceBackend

NEEDS = AttentionNeeds(
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    v_head_dim=8,
    scale=0.3,
    causal=True,
    left=8,
    right=None,
    sink=Sink.COLUMN,
    paged=True,
    dtype=torch.float32,
    device="cpu",
)


class Picky(ReferenceBackend):
    """Declares that it cannot do sinks."""

    name = "picky"

    def unsupported(self, needs: AttentionNeeds) -> str | None:
        return None if needs.sink is Sink.NONE else "it has no sinks"


class Deaf(ReferenceBackend):
    """Claims everything and drops sinks and windows, as real kernels have done."""

    name = "deaf"

    def varlen(self, needs, q, k, v, meta, sinks):
        plain = replace(needs, sink=Sink.NONE, left=None, right=None)
        return super().varlen(plain, q, k, v, meta, None)


class Broken(ReferenceBackend):
    """Works packed; its paged kernel does not load."""

    name = "broken"

    def paged(self, needs, q, k_cache, v_cache, meta, sinks):
        raise RuntimeError("no kernel image is available")


@pytest.fixture
def extra_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that are preferred to ours, with defects."""
    extra = {backend.name: backend for backend in (Picky, Deaf, Broken)}
    factories = {**extra, **registry._FACTORIES}
    monkeypatch.setattr(registry, "_FACTORIES", factories)
    monkeypatch.setattr(registry, "BACKENDS", tuple(factories))


def test_the_first_capable_backend_is_chosen() -> None:
    assert AttentionSelector("llm").select(NEEDS, "sliding").backend.name == "sdpa"


def test_equal_layers_share_one_attention() -> None:
    selector = AttentionSelector("llm")
    assert selector.select(NEEDS, "sliding") is selector.select(NEEDS, "sliding")
    assert selector.select(NEEDS, "sliding") is not selector.select(
        replace(NEEDS, left=None), "full"
    )


def test_an_override_is_used_and_reported() -> None:
    selector = AttentionSelector("llm", override="reference")
    selector.select(NEEDS, "sliding")
    (bound,) = selector.choices
    assert (bound.layer_kind, bound.backend.name) == ("sliding", "reference")
    assert bound.reason == "chosen by configuration" and not bound.demoted


def test_an_unknown_override_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown attention backend 'fa9'; known: native, sdpa"):
        AttentionSelector("llm", override="fa9")


@pytest.mark.usefixtures("extra_backends")
def test_an_override_that_cannot_serve_is_an_error_with_the_reason() -> None:
    selector = AttentionSelector("vision", override="picky")
    with pytest.raises(ConfigError, match="'picky' cannot serve the band layers of vision: it has"):
        selector.select(NEEDS, "band")


@pytest.mark.usefixtures("extra_backends")
def test_a_backend_that_declines_is_passed_over_with_its_reason() -> None:
    bound = AttentionSelector("vision").select(NEEDS, "band")
    assert bound.backend.name == "deaf"
    assert bound.reason == "first that can serve; picky: it has no sinks"


@pytest.mark.usefixtures("extra_backends")
def test_the_probe_demotes_wrong_and_broken_backends(caplog: pytest.LogCaptureFixture) -> None:
    selector = AttentionSelector("vision")
    bound = selector.select(NEEDS, "band")
    with caplog.at_level(logging.WARNING):
        selector.probe()
    assert bound.backend.name == "sdpa" and bound.demoted
    assert bound.reason == "broken failed: RuntimeError: no kernel image is available"
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "falls back from deaf to broken: it differs from the reference" in messages[0]
    assert "falls back from broken to sdpa" in messages[1]


@pytest.mark.usefixtures("extra_backends")
@pytest.mark.parametrize(
    "needs",
    [
        replace(NEEDS, sink=Sink.NONE),
        replace(NEEDS, sink=Sink.KEY0, left=None),
        replace(NEEDS, sink=Sink.COLUMN, left=None),
        replace(NEEDS, sink=Sink.NONE, causal=False, left=64, right=64, paged=False),
    ],
)
def test_the_probe_sees_each_defect_alone(needs: AttentionNeeds) -> None:
    selector = AttentionSelector("vision", override="deaf")
    bound = selector.select(needs, "band")
    selector.probe()
    assert bound.demoted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_our_backends_pass_the_probe(dtype: torch.dtype) -> None:
    for name in ("sdpa", "reference"):  # native declines such layers
        selector = AttentionSelector("llm", override=name)
        for sink in Sink:
            for left in (None, 8, 128):
                needs = replace(NEEDS, sink=sink, left=left, dtype=dtype, v_head_dim=6)
                selector.select(needs, f"{sink.value} {left}")
        selector.probe()
        assert not any(bound.demoted for bound in selector.choices)


def test_keys_come_packed_or_from_the_cache() -> None:
    bound = AttentionSelector("llm").select(NEEDS, "sliding")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 8, generator=generator)
    k, v = torch.randn(2, 5, 2, 8, generator=generator)
    sinks = torch.zeros(4)
    packed = bound(q, k, v, Varlen((3,), (5,)), sinks)
    caches = [torch.cat((x, torch.zeros(3, 2, 8))).view(2, 4, 2, 8) for x in (k, v)]
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    cached = bound(q, *caches, Paged((3,), (5,), table, 4), sinks)
    assert torch.equal(packed, cached)
