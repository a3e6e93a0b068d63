"""Three times more work than the system can do: it does as much as ever and refuses the rest."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.live import ROOT, Stack
from tests.support.vitals import resident_mib

SEED = 6
DEADLINE_S = 10.0
CLOSED_LOOPS = (8, 16, 32, 64)
CLOSED_LOOP_S = 10.0
OPEN_LOOP_S = 60.0
OVERLOAD = 3.0

MIN_GOODPUT = 0.8
MAX_REFUSAL_S = 0.05  # 95th percentile
MAX_GROWTH_MIB = 256.0

_CALL = re.compile(r"gateway info: call .*code=(\w+) seconds=([\d.e-]+)")


@pytest.mark.check
@pytest.mark.alone
@pytest.mark.timeout(500)
def test_goodput_holds_under_three_times_the_load(pair: Stack) -> None:
    best = _best_closed_loop(pair)
    before = resident_mib(pair)
    num_lines = len(_log(pair))
    rate = OVERLOAD * best
    result = _generate(pair, rate=rate, seconds=OPEN_LOOP_S, name="open")
    growth = {name: mib - before[name] for name, mib in resident_mib(pair).items()}
    # As the gateway saw it: the generator is nice and therefore late.
    calls = [found.groups() for line in _log(pair)[num_lines:] if (found := _CALL.search(line))]
    served = [float(seconds) for code, seconds in calls if code == "OK"]
    refused = [float(seconds) for code, seconds in calls if code == "RESOURCE_EXHAUSTED"]
    goodput = sum(1 for seconds in served if seconds <= DEADLINE_S) / result["seconds"]
    codes = Counter(code for code, _ in calls)
    late = sum(1 for seconds in served if seconds > DEADLINE_S)
    offered = result["sent"] / result["sending_seconds"]
    print(  # noqa: T201
        f"best closed loop {best:.1f}/s; open loop at {offered:.1f}/s: goodput "
        f"{goodput:.1f}/s = {goodput / best:.0%}; {dict(codes)}; refusals p50 "
        f"{1000 * np.percentile(refused or [0.0], 50):.0f} ms, p95 "
        f"{1000 * np.percentile(refused or [0.0], 95):.0f} ms; {late} of {len(served)} left the "
        f"gateway late, the last after {max(served):.2f} s; growth {growth}"
    )
    assert refused, "it was no overload"
    assert offered >= 0.9 * rate, "the generator could not keep up"
    assert codes.keys() <= {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}, codes
    assert late == 0
    assert np.percentile(refused, 95) <= MAX_REFUSAL_S
    assert max(growth.values()) < MAX_GROWTH_MIB, growth
    assert goodput >= MIN_GOODPUT * best


def _best_closed_loop(stack: Stack) -> float:
    """Answers a second with as many askers as suit the system best."""
    rates = []
    for workers in CLOSED_LOOPS:
        result = _generate(stack, workers=workers, seconds=CLOSED_LOOP_S, name=f"closed {workers}")
        rates.append(result["answered"] / result["seconds"])
    return max(rates)


def _generate(stack: Stack, **how: Any) -> dict[str, Any]:
    config = {"rest": stack.rest_url, "deadline_s": DEADLINE_S, "seed": SEED, **how}
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.generator", json.dumps(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        start_new_session=True,
    )
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def _log(stack: Stack) -> list[str]:
    path = Path(stack.state["store"].removeprefix("unix://")).parent / "gateway-0.log"
    return path.read_text().splitlines()
