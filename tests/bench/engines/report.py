"""What comes of a comparison: one result per model and number of threads, pooled and printed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.bench.engines.figures import OURS, PREFILL, RATE, Round, Shape, rates, verdicts

COLUMNS = ("engine", "batch", "tokens/s", "decode", "prefill", f"{OURS} / it", "tokens agree")


@dataclass
class Result:
    """What one model and number of threads gave. Rounds and agreement are by engine, then batch;
    ``agree`` counts greedy tokens that equal ours up to the first that does not, and all."""

    model: str
    threads: int
    dtype: str
    input_tokens: int
    output_tokens: int
    seconds: dict[str, dict[int, list[Round]]] = field(default_factory=dict)
    agree: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    load_averages: list[float] = field(default_factory=list)

    @property
    def engines(self) -> dict[str, dict[int, dict[str, dict[str, float]]]]:
        """Rates by engine and batch."""
        return {
            name: {
                batch: rates(rounds, Shape(batch, self.input_tokens, self.output_tokens))
                for batch, rounds in sorted(by_batch.items())
            }
            for name, by_batch in self.seconds.items()
        }

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        return verdicts(self.model, self.engines)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "engines": self.engines, "verdicts": self.verdicts}


def to_text(results: Iterable[Result]) -> str:
    return json.dumps({"results": [result.to_json() for result in results]})


def read(path: Path) -> list[Result]:
    """The results of a file of what ``to_text`` gave."""
    return [_result(content) for content in json.loads(path.read_text())["results"]]


def _result(content: Mapping[str, Any]) -> Result:
    own = {name: content[name] for name in Result.__dataclass_fields__}
    seconds = {
        name: {int(batch): [Round(**each) for each in rounds] for batch, rounds in of.items()}
        for name, of in content["seconds"].items()
    }
    agree = {
        name: {int(batch): (same, of_all) for batch, (same, of_all) in of.items()}
        for name, of in content["agree"].items()
    }
    return Result(**{**own, "seconds": seconds, "agree": agree})


def pool(results: Iterable[Result]) -> list[Result]:
    """One result for each model, threads, dtype and length, with the rounds of all. Pieces whose
    engines were not measured in turns make poor ratios: give every piece the same engines."""
    pooled: dict[tuple[object, ...], Result] = {}
    for one in results:
        key = (one.model, one.threads, one.dtype, one.input_tokens, one.output_tokens)
        into = pooled.setdefault(
            key, replace(one, seconds={}, agree={}, absent={}, load_averages=[])
        )
        for name, by_batch in one.seconds.items():
            for batch, rounds in by_batch.items():
                into.seconds.setdefault(name, {}).setdefault(batch, []).extend(rounds)
        for name, agree in one.agree.items():
            into.agree.setdefault(name, {}).update(agree)
        into.absent |= one.absent
        into.load_averages += one.load_averages
    return list(pooled.values())


def table(result: Result) -> str:
    """Best and median of each rate, ratios and what they are held against, as Markdown."""
    engines = result.engines
    loads = ", ".join(f"{load:.1f}" for load in result.load_averages)
    rows: list[Sequence[str]] = [COLUMNS]
    for name, by_batch in engines.items():
        for batch, row in by_batch.items():
            ours = engines.get(OURS, {}).get(batch)
            same, of_all = result.agree.get(name, {}).get(batch, (0, 0))
            rows.append(
                (
                    name,
                    str(batch),
                    *(_cell(row[rate]) for rate in (RATE, "decode_tokens_per_s", PREFILL)),
                    f"{ours[RATE]['best'] / row[RATE]['best']:.2f}" if ours else "",
                    f"{same}/{of_all}" if of_all and name != OURS else "",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    counts = {len(rounds) for of in result.seconds.values() for rounds in of.values()}
    title = (
        f"{result.model}, {result.threads} thread(s), {result.dtype}, {result.input_tokens} tokens "
        f"in, {result.output_tokens} out; rounds {'/'.join(map(str, sorted(counts)))}, best "
        f"(median); load average {loads}"
    )
    absent = [f"* {name} did not run: {reason}" for name, reason in result.absent.items()]
    return "\n".join([title, "", *lines, "", *absent, *map(_verdict, result.verdicts)])


def _cell(rate: Mapping[str, float]) -> str:
    return f"{rate['best']:.0f} ({rate['median']:.0f})"


def _verdict(verdict: Mapping[str, Any]) -> str:
    mark = "reached" if verdict["reached"] else "MISSED"
    return (
        f"* {verdict['kind']} x{verdict['least']} of {verdict['what']} at batch "
        f"{verdict['batch']}: x{verdict['ratio_of_bests']:.2f} of {verdict['rival']}'s best "
        f"(medians x{verdict['ratio_of_medians']:.2f}) {mark}"
    )
