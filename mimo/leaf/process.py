"""``main`` of a model service."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from mimo.leaf.settings import LeafSettings
from mimo.metrics import Metrics
from mimo.rpc.server import Service, run_process, serve

SettingsT = TypeVar("SettingsT", bound=LeafSettings)


def run_leaf(
    component: str,
    settings_class: type[SettingsT],
    service: Callable[[SettingsT, Metrics], AbstractAsyncContextManager[Service]],
) -> int:
    """Serve what ``service`` loads until told to stop. Returns the exit status."""

    async def body(settings: SettingsT, metrics: Metrics) -> None:
        await serve(settings, settings.address, metrics, lambda: service(settings, metrics))

    return run_process(component, settings_class, body)
