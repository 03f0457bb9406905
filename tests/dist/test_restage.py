"""A run is resumed on another number of stages; its batches, losses, moves, checkpoints and texts don't depend on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from thinpipe.checkpoint import find


@pytest.mark.slow
def test_stages_may_change_and_nothing_else_does(tmp_path: Path, corpus: dict[str, Any]) -> None:
    command = [sys.executable, str(Path(__file__).with_name("restage.py")), str(tmp_path), json.dumps(corpus)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    report = json.loads((tmp_path / "report.json").read_text())
    for case, runs in report["runs"].items():
        whole = runs["four"]
        saved = find(tmp_path / case / "four" / "checkpoints", None, None, pytest.fail)
        assert len(whole["losses"]) == 8 and len(set(whole["ids"])) == 8 and saved is not None
        assert [move["step"] for move in whole["moves"]] == ([2, 4, 6] if case == "tied" else [])
        for name, run in runs.items():
            assert run["ids"] == whole["ids"], f"{case}, {name}: a batch was repeated or skipped"  # FIELD.md kind 10
            assert run["losses"] == pytest.approx(whole["losses"], rel=1e-5), (case, name)
            for move, reference in zip(run["moves"], whole["moves"], strict=True):
                assert move["step"] == reference["step"]
                assert move["angles"] == pytest.approx(reference["angles"], abs=1e-4)
                assert move["energy_before"] == pytest.approx(reference["energy_before"], rel=1e-4)
                assert move["energy_after"] == pytest.approx(reference["energy_after"], rel=1e-4)
                assert 0 < move["energy_before"] < 1 and 0 < move["energy_after"] < 1 and max(move["angles"]) > 1e-3
            last = find(tmp_path / case / name / "checkpoints", None, None, pytest.fail)
            assert last is not None and last.step == 8 and last.names == saved.names, (case, name)
            torch.testing.assert_close(last.tensors(last.names), saved.tensors(saved.names), rtol=1e-3, atol=1e-5)
    for written in report["texts"]:  # by process: of the pipelines that it was in
        for text in written.values():
            assert text == report["texts"][0]["1"]
