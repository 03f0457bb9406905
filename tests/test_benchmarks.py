"""What the benchmarks make of results that are stored in part."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

LEARNING = Path(__file__).parents[1] / "benchmarks/learning.py"


def test_a_tier_without_a_place_and_half_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is shown whatever is missing; a plot of half a pair is not drawn; a page without the tier's place is an error."""
    spec = importlib.util.spec_from_file_location("learning", LEARNING)
    assert spec is not None and spec.loader is not None
    learning = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "learning", learning)
    spec.loader.exec_module(learning)
    monkeypatch.setattr(learning, "DOCS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["learning.py", "--tier", "3", "--plot"])
    row = {"val_loss": 3.5, "compression": 1.0, "parameters": 10**6, "tokens": 10**6, "epochs": 1.0, "curve": [[8, 3.5]]}
    (tmp_path / "learning-3.json").write_text(json.dumps({"dense#0": row}))
    page = tmp_path / "learning.md"
    page.write_text("<!-- tier 1 -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match=r"learning\.md has no place for this table; .*<!-- tier 3 -->"):
        learning.main()
    shown = capsys.readouterr().out
    assert "| dense | 1× | 3.500 |" in shown and "no plot yet" in shown and not list(tmp_path.glob("*.png"))
    page.write_text("<!-- tier 3 -->\n<!-- end -->\n")
    learning.main()
    assert "| dense | 1× | 3.500 |" in page.read_text()
