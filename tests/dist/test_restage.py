"""A run is resumed on another number of stages; its checkpoints, moves and texts don't depend on it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_stages_may_change_and_nothing_else_does(spawn: Callable[..., str], tmp_path: Path, corpus: dict[str, Any]) -> None:
    output = spawn("restage.py", 8, str(tmp_path), json.dumps(corpus))
    (line,) = [line for line in output.splitlines() if "RESULT " in line]
    report = json.loads(line.partition("RESULT ")[2])
    whole = report["four"]
    assert len(whole["losses"]) == 8 and len(set(whole["ids"])) == 8
    for name in ("one", "two", "changing"):
        assert report[name]["ids"] == whole["ids"], "a batch was repeated or skipped"  # FIELD.md kind 10
        assert report[name]["losses"] == pytest.approx(whole["losses"], rel=1e-5), name
    for name, moves in report["moves"].items():
        assert [move["step"] for move in moves] == [2, 4, 6], name
        for move, reference in zip(moves, report["moves"]["four"], strict=True):
            assert move["angles"] == pytest.approx(reference["angles"], abs=1e-4)
            assert move["energy_before"] == pytest.approx(reference["energy_before"], rel=1e-4)
            assert move["energy_after"] == pytest.approx(reference["energy_after"], rel=1e-4)
            assert 0 < move["energy_before"] < 1 and 0 < move["energy_after"] < 1 and max(move["angles"]) > 1e-3
    for texts in report["texts"]:  # by process: of the pipelines that it was in
        for text in texts.values():
            assert text == report["texts"][0]["1"]
