"""A machine whose network goes away, between namespaces: seconds are ridden out, longer is a loss from which all recover."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
from life_kills import write_config
from test_command import finish, wait_for_step
from test_machines import losses

from thinpipe.lab import lab, parse_links, unavailable
from thinpipe.trial import train_on

_REASON = unavailable()
requires_net = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
TIMEOUT = 5.0


@requires_net
def test_a_short_cut_is_ridden_out_and_a_long_one_survived(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=60, checkpoint_every=10)
    with lab(parse_links("80mbit,5ms", 1), 2, prefix="thinpipecut") as net:
        machines = []
        for place in range(2):
            command = train_on(net.hosts, place, config, tmp_path / "run", "--network.timeout", str(TIMEOUT))
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            machines.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        for step, seconds in ((5, TIMEOUT / 2), (25, 2 * TIMEOUT)):
            wait_for_step(tmp_path / "run", step)
            net.cut(1)
            time.sleep(seconds)
            net.restore(1)
        ends = [finish(machine) for machine in machines]
    assert [status for status, _, _ in ends] == [0, 0], ends
    for _, _, err in ends:
        # Of the stages' loss; and of the meeting's host, whose connection may have been silent for too long as well.
        assert 1 <= err.count("starting again") <= 1 + err.count("lost the meeting's host") and "heard nothing" in err, err
    status = subprocess.run([sys.executable, "-m", "thinpipe", "train", str(config), "--run.dir", str(tmp_path / "whole")], check=False)
    assert status.returncode == 0 and losses(tmp_path / "run") == losses(tmp_path / "whole")
