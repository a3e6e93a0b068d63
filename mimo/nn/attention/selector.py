"""Which backend serves which kind of layer, and why."""

import logging
from collections.abc import Sequence

from torch import Tensor

from mimo.errors import ConfigError
from mimo.nn.attention import registry
from mimo.nn.attention.base import AttentionBackend, AttentionNeeds, Paged, Sink, Varlen
from mimo.nn.attention.probe import probe

logger = logging.getLogger(__name__)


class BoundAttention:
    """The attention of one kind of layer, with the backend chosen for it.

    Layers keep the object and call it; a failed probe replaces the backend behind it.
    """

    def __init__(
        self, needs: AttentionNeeds, layer_kind: str, backend: AttentionBackend, reason: str
    ) -> None:
        self.needs = needs
        self.layer_kind = layer_kind
        self.backend = backend
        self.reason = reason
        self.demoted = False

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, meta: Varlen | Paged, sinks: Tensor | None = None
    ) -> Tensor:
        """q: [T, N, H]; packed k, v: [S, K, H or Hv], or their caches with Paged -> [T, N, Hv]."""
        assert (sinks is None) == (self.needs.sink is Sink.NONE), "sinks contradict the layer"
        if isinstance(meta, Paged):
            assert self.needs.paged, "the layer did not ask for paged attention"
            return self.backend.paged(self.needs, q, k, v, meta, sinks)
        return self.backend.varlen(self.needs, q, k, v, meta, sinks)


class AttentionSelector:
    """Chooses a backend per kind of layer: the override if given, else the first that can serve.

    ``component`` names the tower in messages: vision, audio, llm, ...
    """

    def __init__(self, component: str, *, override: str | None = None) -> None:
        self._component = component
        self._override = None if override is None else registry.create(override)
        self._bound: dict[tuple[str, AttentionNeeds], BoundAttention] = {}

    def select(self, needs: AttentionNeeds, layer_kind: str) -> BoundAttention:
        """The attention for a layer; equal layers share one object.

        Raises ConfigError when the override cannot serve the layer: a choice is never dropped.
        """
        key = (layer_kind, needs)
        if key not in self._bound:
            self._bound[key] = self._choose(needs, layer_kind)
        return self._bound[key]

    def probe(self) -> None:
        """Try every chosen backend on a small case; one that fails gives way to the next."""
        for bound in self._bound.values():
            rejected: list[str] = []
            while (failure := probe(bound.backend, bound.needs)) is not None:
                rejected.append(bound.backend.name)
                self._demote(bound, failure, rejected)

    @property
    def choices(self) -> list[BoundAttention]:
        """The attention of every kind of layer that was selected."""
        return list(self._bound.values())

    def _choose(self, needs: AttentionNeeds, layer_kind: str) -> BoundAttention:
        if self._override is None:
            backend, reason = _first_capable(needs, exclude=())
            return BoundAttention(needs, layer_kind, backend, reason)
        obstacle = self._override.unsupported(needs)
        if obstacle is not None:
            raise ConfigError(
                f"attention backend {self._override.name!r} cannot serve the {layer_kind} layers"
                f" of {self._component}: {obstacle}"
            )
        return BoundAttention(needs, layer_kind, self._override, "chosen by configuration")

    def _demote(self, bound: BoundAttention, failure: str, rejected: Sequence[str]) -> None:
        failed = bound.backend.name
        bound.backend, _ = _first_capable(bound.needs, exclude=rejected)
        bound.reason = f"{failed} {failure}"
        bound.demoted = True
        logger.warning(
            "%s: attention of the %s layers falls back from %s to %s: it %s",
            self._component,
            bound.layer_kind,
            failed,
            bound.backend.name,
            failure,
        )


def _first_capable(needs: AttentionNeeds, exclude: Sequence[str]) -> tuple[AttentionBackend, str]:
    """The most preferred backend that can serve, and what speaks for it."""
    obstacles: list[str] = []
    for name in registry.BACKENDS:
        if name in exclude:
            continue
        backend = registry.create(name)
        obstacle = backend.unsupported(needs)
        if obstacle is None:
            return backend, "; ".join(["first that can serve", *obstacles])
        obstacles.append(f"{name}: {obstacle}")
    raise ConfigError(f"no attention backend is left: {'; '.join(obstacles) or 'all failed'}")
