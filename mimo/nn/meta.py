"""Building a module whose weights come from a checkpoint: no memory, no random numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules built inside have parameters on the meta device, which the loader then assigns.

    Initialisers are skipped as well: on the meta device they would do nothing, and the first of
    them imports torch's compiler, which takes seconds.
    """
    with torch.device("meta"), _SkipInitialisers():
        yield


class _SkipInitialisers(TorchFunctionMode):
    """Functions of ``torch.nn.init`` return their tensor as it is."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
