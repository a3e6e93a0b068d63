"""Three times more work than the system can do: it does as much as ever and refuses the rest."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.generator import ask_any
from tests.support.live import ROOT, Stack
from tests.support.load import Answer, Clients, closed_loop, percentile
from tests.support.vitals import resident_mib

SEED = 6
DEADLINE_S = 10.0
CLOSED_LOOPS = (8, 16, 32)
CLOSED_LOOP_S = 10.0
OPEN_LOOP_S = 60.0
OVERLOAD = 3.0

MIN_GOODPUT = 0.8
MAX_REFUSAL_S = 0.05  # 95th percentile
MAX_DELIVERY_S = 0.5
MAX_GROWTH_MIB = 256.0

_CALL = re.compile(r"gateway info: call .*code=(\w+) seconds=([\d.e-]+)")


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_goodput_holds_under_three_times_the_load(pair: Stack) -> None:
    best = await _best_closed_loop(pair)
    before = resident_mib(pair)
    num_lines = len(_log(pair))
    config = {
        "rest": pair.rest_url,
        "grpc": pair.grpc_address,
        "rate": OVERLOAD * best,
        "seconds": OPEN_LOOP_S,
        "deadline_s": DEADLINE_S,
        "seed": SEED,
    }
    result = await asyncio.to_thread(_generate, config)
    growth = {name: mib - before[name] for name, mib in resident_mib(pair).items()}
    # As the gateway saw it: the generator is nice and therefore late.
    calls = [found.groups() for line in _log(pair)[num_lines:] if (found := _CALL.search(line))]
    served = [float(seconds) for code, seconds in calls if code == "OK"]
    refused = [float(seconds) for code, seconds in calls if code == "RESOURCE_EXHAUSTED"]
    goodput = sum(1 for seconds in served if seconds <= DEADLINE_S) / result["seconds"]
    codes = Counter(code for code, _ in calls)
    late = sum(1 for seconds in served if seconds > DEADLINE_S)
    print(  # noqa: T201
        f"best closed loop {best:.1f}/s; open loop at {OVERLOAD * best:.1f}/s: goodput "
        f"{goodput:.1f}/s = {goodput / best:.0%}; {dict(codes)}; refusals p50 "
        f"{1000 * percentile(refused or [0.0], 0.5):.0f} ms, p95 "
        f"{1000 * percentile(refused or [0.0], 0.95):.0f} ms; {late} of {len(served)} left the "
        f"gateway late, the last after {max(served):.2f} s; growth {growth}"
    )
    assert refused, "it was no overload"
    assert codes.keys() <= {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}, codes
    # The last word is weighed against the deadline; then it still has to leave a busy process.
    assert max(served) <= DEADLINE_S + MAX_DELIVERY_S
    assert percentile(refused, 0.95) <= MAX_REFUSAL_S
    assert max(growth.values()) < MAX_GROWTH_MIB, growth
    assert goodput >= MIN_GOODPUT * best


async def _best_closed_loop(stack: Stack) -> float:
    """Answers a second with as many askers as suit the system best."""
    rates = []
    async with Clients.opened(stack.rest_url, stack.grpc_address) as clients:
        for workers in CLOSED_LOOPS:

            async def ask(number: int, chance: random.Random, workers: int = workers) -> Answer:
                salt = f"closed {workers} {number}"
                return await ask_any(clients, chance, salt, DEADLINE_S)

            until = asyncio.Event()
            asyncio.get_running_loop().call_later(CLOSED_LOOP_S, until.set)
            answers = await closed_loop(ask, workers=workers, seed=SEED, until=until)
            began, ended = min(a.began for a in answers), max(a.ended for a in answers)
            rates.append(sum(1 for a in answers if not a.error) / (ended - began))
    return max(rates)


def _generate(config: dict[str, Any]) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.generator", json.dumps(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=lambda: os.nice(10),
    )
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def _log(stack: Stack) -> list[str]:
    path = Path(stack.state["store"].removeprefix("unix://")).parent / "gateway-0.log"
    return path.read_text().splitlines()
