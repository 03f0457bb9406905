"""The pipeline over real processes: torch's own schedule as reference, bytes counted from what is sent."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_gradients_are_torchs_and_bytes_are_the_formulas(spawn: Callable[..., str]) -> None:
    output = spawn("against_torch.py", 4)
    (line,) = [line for line in output.splitlines() if "RESULT " in line]
    report = json.loads(line.partition("RESULT ")[2])
    for label in ("wan", "wan, warm-up 4", "gpipe", "1f1b", "ids travel"):
        assert report[label]["equal"], label
    assert not report["float32 wire"]["equal"]  # the rounding is real
    assert len({report[label]["loss"] for label in report if label != "float32 wire"}) == 1
    for label, row in report.items():
        assert row["evaluated"] == pytest.approx(row["loss"], rel=1e-12), label
    boundaries, tokens, rank = 3, 16 * 16, 8
    ids = boundaries * 16 * 17 * 4  # windows of context + 1 ids, int32
    for label, row in report.items():
        number = 4 if label == "float32 wire" else 2
        expected = boundaries * tokens * rank * number
        assert row["backward"] == expected, label
        assert row["forward"] == expected + (ids if label == "ids travel" else 0), label


def test_stages_with_different_data_are_told(spawn: Callable[..., str], tmp_path: Path, corpus: dict[str, Any]) -> None:
    """FIELD.md kind 14: stages that disagree on tokens or batches would hang or train on nonsense."""
    (tmp_path / "more.txt").write_text("one document more\n" * 200)
    output = spawn("data_differs.py", 2, str(tmp_path), json.dumps(corpus))
    assert "RESULT local: the data of stage 1 on" in output and "data.source" in output
    assert "RESULT first: trained 3 steps" in output
