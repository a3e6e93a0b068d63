"""What of the fast products this machine can have; every packing of weights by name."""

import pytest
import torch

from mimo.nn import linear
from mimo.nn.linear import OneDnnWeight, packing_for
from mimo.nn.panels import Panels

needs_onednn = pytest.mark.skipif(
    not linear._has_onednn(), reason="no bfloat16 kernels in this CPU or this torch"
)
needs_panels = pytest.mark.skipif(
    packing_for(torch.float32, "cpu") is not Panels, reason="the kernel cannot be compiled here"
)
each_packing = pytest.mark.parametrize(
    ("packing", "dtype"),
    [
        pytest.param(OneDnnWeight, torch.bfloat16, marks=needs_onednn, id="onednn-bfloat16"),
        pytest.param(Panels, torch.bfloat16, marks=needs_panels, id="panels-bfloat16"),
        pytest.param(Panels, torch.float32, marks=needs_panels, id="panels-float32"),
    ],
)
