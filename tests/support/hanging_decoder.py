"""A decoder whose engine hangs for good in its next step once the process gets SIGUSR1. Everything
else of it goes on."""

import signal
import sys
import threading
from typing import Any

from services.llm.__main__ import main
from services.llm.engine.runner import Runner

_told = threading.Event()
_forward = Runner.forward


def _hang(*arguments: Any) -> Any:
    if _told.is_set():
        threading.Event().wait()
    return _forward(*arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: _told.set())
    Runner.forward = _hang  # type: ignore[method-assign]
    sys.exit(main())
