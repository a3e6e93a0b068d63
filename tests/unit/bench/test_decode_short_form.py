"""The engine comparison runs from end to end, with this engine alone and nothing to install."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live import ROOT


@pytest.mark.check
@pytest.mark.timeout(300)
def test_the_short_form_measures_this_engine(tmp_path: Path) -> None:
    short = ("--rounds", "1", "--batches", "1,2", "--input-tokens", "8", "--output-tokens", "4")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tests.bench.decode", *short, "--threads", "1"),
            *("--models", "bench", "--engines", "mimo,mimo-mtp", "--json", "-"),
            *("--cache", str(tmp_path)),
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    (result,) = json.loads(ended.stdout.splitlines()[-1])["results"]
    assert result["absent"] == {}
    assert result["engines"].keys() == {"mimo", "mimo-mtp"}
    for by_batch in result["engines"].values():
        assert by_batch.keys() == {"1", "2"}
        assert all(by_batch["2"][rate]["best"] > 0 for rate in by_batch["2"])
    assert result["verdicts"] == []  # no rival ran
