"""How a model service comes to life: device, weights, a probe, a first run, and what it then is."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version

import torch

from mimo.checkpoint.directory import model_directory
from mimo.leaf.fingerprint import model_fingerprint
from mimo.leaf.settings import LeafSettings
from mimo.metrics import Metrics
from mimo.nn.attention import AttentionSelector
from mimo.nn.attention.override import override_for
from mimo.nn.device import Compute
from mimo.rpc.replica import AttentionChoice, Description

# Narrower models lose more by handing their products to other threads than they gain.
MULTITHREADED_WIDTH = 512


class Startup:
    """What a service computes with. Its ``describe`` says in the end what came of it.

    Raises ConfigError for a device, dtype or attention backend that cannot be had, CheckpointError
    where there is no model.
    """

    def __init__(self, settings: LeafSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        component = metrics.component
        self.compute = Compute.resolve(settings.device, settings.dtype)
        self.directory = model_directory(settings.model)
        self.selector = AttentionSelector(
            component, override=override_for(component, settings.attention)
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of the start."""
        started = time.monotonic()
        yield
        self._metrics.set("mimo_startup_seconds", time.monotonic() - started, phase=name)

    def use_threads(self, width: int, processes: int = 1) -> None:
        """Let a model of this width use as many CPU threads as it was given, or as pay off. So
        many ``processes`` compute it together and share the cores."""
        if self.compute.device_type == "cpu":
            is_narrow = width < MULTITHREADED_WIDTH
            default = 1 if is_narrow else max(torch.get_num_threads() // processes, 1)
            torch.set_num_threads(self._settings.threads or default)

    def probe(self) -> None:
        """Try the attention backends that the model's layers chose; replace what fails."""
        with self.phase("probe"):
            self.selector.probe()
        demoted = {bound.layer_kind: False for bound in self.selector.choices}
        for bound in self.selector.choices:
            demoted[bound.layer_kind] |= bound.demoted
        for layer_kind, is_demoted in demoted.items():
            self._metrics.set("mimo_attention_demoted", is_demoted, layer_kind=layer_kind)

    def describe(
        self,
        *,
        weights: str,
        config: Mapping[str, object],
        numeric_profile: Mapping[str, str],
        hidden_size: int,
        limits: Mapping[str, int],
    ) -> Description:
        """The loaded model. ``weights`` is the fingerprint of its tensors, ``config`` its part of
        the checkpoint's configuration."""
        dtype, device = self.compute.dtype_name, self.compute.device_type
        return Description(
            component=self._metrics.component,
            version=version("mimo-serve"),
            model=self._settings.served_model_name or self.directory.name,
            fingerprint=model_fingerprint(
                weights=weights,
                config=config,
                numeric_profile=numeric_profile,
                dtype=dtype,
                device_type=device,
            ),
            dtype=dtype,
            device=device,
            hidden_size=hidden_size,
            embedding_dtype=dtype,
            numeric_profile=numeric_profile,
            attention=[
                AttentionChoice(bound.layer_kind, bound.backend.name, bound.reason, bound.demoted)
                for bound in self.selector.choices
            ],
            limits=limits,
        )
