"""Attention behind one interface: layers state needs, backends state capabilities.

A layer builds its :class:`AttentionNeeds` and asks an :class:`AttentionSelector` for a
:class:`BoundAttention`; packed (:class:`Varlen`) and cached (:class:`Paged`) keys are then the same
call.
"""

from mimo.nn.attention.base import AttentionBackend, AttentionNeeds, Paged, Sink, Varlen
from mimo.nn.attention.registry import BACKENDS, create
from mimo.nn.attention.selector import AttentionSelector, BoundAttention

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionNeeds",
    "AttentionSelector",
    "BoundAttention",
    "Paged",
    "Sink",
    "Varlen",
    "create",
]
