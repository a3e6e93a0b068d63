"""What identifies a model: everything but the input that can change a bit of its output."""

import hashlib
from collections.abc import Mapping

from mimo.store.keys import canonical_json

# Raised by a change of our arithmetic that moves results beyond rounding.
NUMERICS_VERSION = 1


def model_fingerprint(
    *,
    weights: str,
    config: Mapping[str, object],
    numeric_profile: Mapping[str, str],
    dtype: str,
    device_type: str,
) -> str:
    """Hex SHA-256 of a loaded model. ``weights`` is the fingerprint of its tensors, ``config`` its
    part of the checkpoint's configuration."""
    facts = {
        "weights": weights,
        "config": config,
        "numeric_profile": numeric_profile,
        "numerics_version": NUMERICS_VERSION,
        "dtype": dtype,
        "device_type": device_type,
    }
    return hashlib.sha256(canonical_json(facts)).hexdigest()
