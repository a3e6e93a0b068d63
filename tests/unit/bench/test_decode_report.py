"""Results of the engine comparison: written, read, pooled and shown."""

from pathlib import Path

from tests.bench.engines import report
from tests.bench.engines.figures import RATE, Round, agreement
from tests.bench.engines.report import Result


def result(model: str = "bench", threads: int = 1, total_s: float = 2.0) -> Result:
    return Result(
        model,
        threads,
        "bfloat16",
        input_tokens=100,
        output_tokens=50,
        seconds={
            "mimo": {1: [Round(0.5, total_s)], 8: [Round(1.0, 2 * total_s)]},
            "llama": {1: [Round(1.0, 2 * total_s)]},
        },
        agree={"mimo": {1: (50, 50)}, "llama": {1: (48, 50)}},
        absent={"vllm": "cannot be installed here"},
        load_averages=[0.5],
    )


def test_agreement_ends_where_a_sequence_parts() -> None:
    ours, theirs = [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]
    assert agreement(ours, theirs) == (6, 8)
    assert agreement(ours, ours) == (8, 8)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    results = [result(), result(threads=2)]
    (tmp_path / "piece.json").write_text(report.to_text(results))
    assert report.read(tmp_path / "piece.json") == results


def test_pieces_of_one_kind_are_pooled_and_others_stand_beside() -> None:
    pieces = [result(total_s=2.0), result(threads=2), result(total_s=1.0), result("bundled")]
    first, second, third = report.pool(pieces)
    assert (first.model, first.threads, second.threads, third.model) == ("bench", 1, 2, "bundled")
    assert first.seconds["llama"] == {1: [Round(1.0, 4.0), Round(1.0, 2.0)]}
    assert first.engines["mimo"][1][RATE] == {"best": 50.0, "median": 37.5}
    assert first.load_averages == [0.5, 0.5]
    assert len(pieces[0].seconds["llama"][1]) == 1  # pieces are left as they are


def test_the_table_has_rates_ratios_agreement_and_who_is_absent() -> None:
    lines = report.table(result()).splitlines()
    assert lines[0].endswith("rounds 1, best (median); load average 0.5")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert ["llama", "1", "12 (12)", "16 (16)", "100 (100)", "2.00", "48/50"] in cells
    assert "* vllm did not run: cannot be installed here" in lines
