"""Every metric of the system is in one closed list.

Recording rules, alerts and dashboards are checked against :data:`METRICS`. What it does not list, a
label value included, is a programming error and raises.
"""

from mimo.metrics.catalogue import (
    AUDIO,
    BY_NAME,
    COMPONENTS,
    GATEWAY,
    LLM,
    METRICS,
    VISION,
    Kind,
    Metric,
)
from mimo.metrics.instruments import Metrics

__all__ = [
    "AUDIO",
    "BY_NAME",
    "COMPONENTS",
    "GATEWAY",
    "LLM",
    "METRICS",
    "VISION",
    "Kind",
    "Metric",
    "Metrics",
]
