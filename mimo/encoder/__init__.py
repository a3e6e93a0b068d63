"""The flow that every encoder shares: join, look up, lease, batch, encode, store, answer."""

from mimo.encoder.request import Encoded, Encoder, EncodeRequest
from mimo.encoder.service import EncodeService

__all__ = ["EncodeRequest", "EncodeService", "Encoded", "Encoder"]
