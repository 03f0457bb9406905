"""Every codec over real boundaries."""

import json
import math
from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_bytes_are_planned_and_a_nan_gets_through(spawn: Callable[..., str]) -> None:
    output = spawn("lossy_wires.py", 3)
    rows = [json.loads(line.partition("RESULT ")[2]) for line in output.splitlines() if "RESULT " in line]
    assert len(rows) == 7
    for row in rows:
        assert row["sent"] == row["planned"], row
        assert math.log(300) - 1 < row["loss"] < math.log(300) + 1.5 and 0 < row["norm"] < 100, row
        # Every stage sees that the step is to be refused.
        assert row["refused"] == [[True, True]] * 3, row
