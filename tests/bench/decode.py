"""How fast engines decode and read prompts: this one, transformers, vLLM and llama.cpp.

    python -m tests.bench.decode --models bench --threads 1 --json bench-1.json
    python -m tests.bench.decode --models bench --threads 2 --json bench-2.json
    python -m tests.bench.decode --pool bench-1.json bench-2.json

Same weights, same prompts, greedy, every engine in a process of its own that stands still while
another has its turn; rounds are interleaved. Two models: `bench` (62 million parameters, random)
and the bundled one. A long run may be made in pieces, each with all its engines; `--pool` puts
pieces of one kind together and shows them. Peers run in environments of their own, made on demand
below --cache: nothing is installed into the project's. Peers' weights are bfloat16, and so is what
every engine computes in (--dtype).

Tokens that agree with ours tell whether engines run the same model: in float32 all do (`--dtype
float32 --rounds 1`); in bfloat16 sequences part at the first close call, random weights early.

To know when reading: vLLM reads values padded to the width of keys; llama.cpp's wheel is built for
AVX2 and is asked over loopback HTTP, the others in process; on prompts of random tokens drafts
(mimo-mtp) seldom hold, so that they cost more than they bring. SGLang has no CPU build that runs
this model.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mimo.checkpoint.directory import BUNDLED
from tests.bench.engines import report
from tests.bench.engines.checkpoints import Forms, write_bench_model, write_forms
from tests.bench.engines.contestants import CONTESTANTS
from tests.bench.engines.environments import Unavailable
from tests.bench.engines.figures import OURS, Round, agreement
from tests.bench.engines.process import EngineProcess
from tests.bench.engines.report import Result

CACHE = Path.home() / ".cache" / "mimo-serve" / "bench"
FIRST_ID = 3  # those before it are special in the peers' vocabularies


def main() -> int:
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine stays behind
    results: list[Result] = []
    if options.pool:
        results = report.pool(result for path in options.pool for result in report.read(path))
        for result in results:
            print(report.table(result), end="\n\n")
        _write(results, options.json)
        return _status(results)
    for model in options.models:
        forms = prepare(model, options.bundled, options.cache, options.dtype)
        for threads in options.threads:
            result = Result(
                model, threads, options.dtype, options.input_tokens, options.output_tokens
            )
            compare(result, options.engines, options.batches, options.rounds, forms, options.cache)
            print(f"\n{report.table(result)}", file=sys.stderr)
            results.append(result)
            _write(results, options.json)  # what a run cut short leaves behind
    return _status(results)


def prepare(model: str, bundled: Path, cache: Path, dtype: str) -> Forms:
    """The model in every form, made anew when ours is newer than the forms."""
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / "models" / model
    ours = bundled if model == "bundled" else folder / "ours"
    if model == "bench" and not (ours / "config.json").is_file():
        write_bench_model(ours)
    forms = Forms(ours, folder, dtype)
    last, sources = (
        forms.square / "config.json",
        [ours / "config.json", *ours.glob("*.safetensors")],
    )
    if not last.is_file() or last.stat().st_mtime < max(each.stat().st_mtime for each in sources):
        for made in folder.glob("*.gguf"):
            made.unlink()
        write_forms(forms)
    return forms


def compare(
    result: Result,
    names: Sequence[str],
    batches: Sequence[int],
    num_rounds: int,
    forms: Forms,
    cache: Path,
) -> None:
    """Fill in each engine's rounds, what kept engines from running, and the machine's load."""
    config = {
        "threads": result.threads,
        "dtype": result.dtype,
        "max_batch": max(batches),
        "context": result.input_tokens + result.output_tokens + 32,
    }
    say = _Progress(f"{result.model}, {result.threads} thread(s)")
    result.load_averages.append(os.getloadavg()[0])
    with contextlib.ExitStack() as running:
        engines: dict[str, EngineProcess] = {}
        for name in names:
            say(f"{name} starts")
            try:
                engine = CONTESTANTS[name].start(forms, cache, config)
                engines[name] = running.enter_context(engine)
            except Unavailable as reason:
                result.absent[name] = str(reason)
                say(f"{name} did not start: {reason}")
        for number in range(num_rounds + 1):  # the first is for warming up
            for batch in batches:
                prompts = _prompts(batch, result.input_tokens, forms.vocab_size)
                speeds = _take_turns(result, engines, prompts, kept=number > 0)
                shown = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
                say(f"round {number} of {num_rounds}, batch {batch}, tokens/s: {shown}")
            result.load_averages.append(os.getloadavg()[0])


def _take_turns(
    result: Result, engines: dict[str, EngineProcess], prompts: list[list[int]], *, kept: bool
) -> dict[str, float]:
    """Tokens per second of each engine. One that fails leaves ``engines``, and its rounds."""
    speeds: dict[str, float] = {}
    tokens: dict[str, list[list[int]]] = {}
    batch, num_tokens = len(prompts), result.output_tokens
    for name, engine in list(engines.items()):
        try:  # the prompts read for their first tokens alone, then the whole
            engine.run(prompts, 1)  # not counted: a process that stood still has a cold memory
            prefill_s, _ = engine.run(prompts, 1)
            total_s, tokens[name] = engine.run(prompts, num_tokens)
        except Unavailable as reason:
            result.absent[name] = str(reason)
            result.seconds.pop(name, None)
            result.agree.pop(name, None)
            del engines[name]
            continue
        speeds[name] = batch * num_tokens / total_s
        if kept:
            rounds = result.seconds.setdefault(name, {}).setdefault(batch, [])
            rounds.append(Round(prefill_s, total_s))
    for name in tokens if OURS in tokens else ():
        agree = agreement(tokens[OURS], tokens[name])
        result.agree.setdefault(name, {})[batch] = agree
    return speeds


class _Progress:
    """Says what happened, and after how many seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._began = what, time.monotonic()

    def __call__(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        print(f"{self._what} {seconds:>5.0f} s: {text}", file=sys.stderr, flush=True)


def _prompts(batch: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    chance = random.Random(batch)
    return [
        [chance.randrange(FIRST_ID, vocab_size) for _ in range(num_tokens)] for _ in range(batch)
    ]


def _write(results: Sequence[Result], path: str) -> None:
    if path == "-":
        print(report.to_text(results))
    elif path:
        Path(path).write_text(report.to_text(results))


def _status(results: Sequence[Result]) -> int:
    """1 when a gate is missed: goals do not count."""
    judged = [verdict for result in results for verdict in result.verdicts]
    return int(not all(each["reached"] for each in judged if each["kind"] == "gate"))


def _parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def words(*known: str) -> Any:
        def parse(text: str) -> list[str]:
            if unknown := set(text.split(",")) - set(known):
                raise argparse.ArgumentTypeError(f"{sorted(unknown)}: not of {', '.join(known)}")
            return text.split(",")

        return parse

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    engines, models = words(*CONTESTANTS), words("bench", "bundled")
    parser.add_argument("--engines", type=engines, default=[*CONTESTANTS], help="by commas")
    parser.add_argument("--models", type=models, default=["bench", "bundled"], help="by commas")
    parser.add_argument("--bundled", type=Path, default=BUNDLED, help="directory of that model")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32], help="by commas")
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="by commas")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=CACHE, help="environments and models")
    parser.add_argument("--json", default="", metavar="FILE", help="- is the standard output")
    parser.add_argument(
        "--pool",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="run nothing: tables of these",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
