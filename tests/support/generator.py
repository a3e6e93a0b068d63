"""An open loop of questions in a process of its own, so that it can be nicer than the servers.

    python -m tests.support.generator '{"rest": …, "grpc": …, "rate": 50, "seconds": 60, …}'

Prints one JSON object: how many were sent, and the seconds from the first to the last answer.
What became of each is in the log of the gateway, which is not nice and therefore on time.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

from tests.support import samples
from tests.support.live import image
from tests.support.load import Answer, Clients, Question

TEXT = Question("text", ("tell me a story",), num_tokens=16)
PICTURES = tuple(
    Question(f"picture {number}", (image(samples.png(60 + number)), "what is it?"), num_tokens=16)
    for number in range(8)
)
SHARE_OF_PICTURES = 0.3


async def ask_any(clients: Clients, chance: random.Random, salt: str, deadline_s: float) -> Answer:
    """A question that nobody has asked before, in the mix that the test is about."""
    question = chance.choice(PICTURES) if chance.random() < SHARE_OF_PICTURES else TEXT
    return await clients.ask(question, "rest", salt=salt, timeout_s=deadline_s)


async def open_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Questions at random moments (a Poisson process), whatever becomes of them."""
    chance = random.Random(config["seed"])
    async with Clients.opened(config["rest"], config["grpc"]) as clients:
        began = due = time.monotonic()
        asked: list[asyncio.Task[Answer]] = []
        while due < began + config["seconds"]:
            due += chance.expovariate(config["rate"])
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            salt = f"open {config['seed']} {len(asked)}"
            asked.append(asyncio.create_task(ask_any(clients, chance, salt, config["deadline_s"])))
        answers = await asyncio.gather(*asked)
    return {"sent": len(answers), "seconds": max(answer.ended for answer in answers) - began}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(open_loop(json.loads(sys.argv[1])))))  # noqa: T201
