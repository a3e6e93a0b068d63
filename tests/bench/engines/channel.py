"""How a runner hears what to do and tells how long it took. Standard library only: it runs in
environments that have nothing of this project.

Orders come on standard input, answers go to a pipe of their own, because engines print. An order
is one JSON object with ``ids`` (prompts) and ``num_tokens``; the answer is the seconds it took and
the ``tokens`` of each sequence.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]


def config() -> dict[str, Any]:
    """What the runner was started with."""
    parsed: dict[str, Any] = json.loads(sys.argv[1])
    return parsed


def serve(generate: Generate) -> None:
    """``generate(ids, num_tokens)`` returns the new tokens of each sequence."""
    with os.fdopen(config()["fd"], "w") as answers:
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            began = time.perf_counter()
            tokens = generate(order["ids"], order["num_tokens"])
            seconds = time.perf_counter() - began
            answer: dict[str, Any] = {"seconds": seconds, "tokens": tokens}
            if (counts := [*map(len, tokens)]) != [order["num_tokens"]] * len(order["ids"]):
                answer = {"error": f"{order['num_tokens']} tokens were asked for, got {counts}"}
            print(json.dumps(answer), file=answers, flush=True)
