"""Losslessness over real processes (METHOD.md section 4)."""

import json
from collections.abc import Callable


def test_every_method_schedule_and_number_of_stages(spawn: Callable[..., str]) -> None:
    output = spawn("verify_all.py", 8)
    results = [json.loads(line.partition("RESULT ")[2]) for line in output.splitlines() if "RESULT " in line]
    by_label: dict[str, list[dict]] = {}
    for result in results:
        by_label.setdefault(result["label"], []).append(result)
    assert len(by_label["whole"]) == 4 * 4 and len(by_label["tied, ids on the wire"]) == 2 * 3
    assert len(by_label["lossy"]) == 6 and len(by_label["tables"]) == 4 and len(by_label["local losses"]) == 3
    for result in by_label["whole"] + by_label["tied, ids on the wire"] + by_label["lossy"] + by_label["tables"] + by_label["local losses"] + by_label["whole again"]:
        assert result["ok"], result
        assert result["loss_rel_diff"] <= 1e-12 and result["grad_max_rel_diff"] <= 1e-9, result
        # Same shapes, same threads: the same bits.
        assert result["wire_loss_rel_diff"] == 0, result
        assert result["wire_grad_max_rel_diff"] < 1e-6, result
        assert 0 < result["rounding_loss_rel_diff"] < (0.1 if result in by_label["lossy"] else 1e-3), result
    for label in ("dropped micro-batch", "clip per stage", "no clip"):
        assert [result["ok"] for result in by_label[label]] == [False], by_label[label]
