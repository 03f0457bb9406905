"""`thinpipe probe` as it is typed on three machines, over the lab's links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny

from thinpipe.config import dump, from_dict
from thinpipe.lab import lab, parse_links, unavailable

_REASON = unavailable()
requires_net = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
NEAR, FAR = (40.0, 20.0), (10.0, 40.0)  # Mbit/s and round trip in ms of the two boundaries


@pytest.mark.slow
@requires_net
def test_probe_measures_and_puts_the_neighbours_side_by_side(tmp_path: Path) -> None:
    """Three hosts in a row stand in the order 0, 2, 1; between the outer two lie both boundaries."""
    path = tmp_path / "config.toml"
    path.write_text(dump(from_dict(tiny(pipeline={"stages": 3}, compression={"segments": 3}, plan={"gpu": "cpu"}))))
    places = [0, 2, 1]
    with lab(parse_links("40mbit,10ms/10mbit,20ms", 2), 3, prefix="thinpipeprobe") as net:
        ask = [sys.executable, "-m", "thinpipe", "probe", str(path), "--json", "--network.nodes", "3"]
        ask += ["--network.rdzv", f"{net.hosts[0].address}:29400", "--network.node-rank"]
        machines = [
            subprocess.Popen(
                [*host.command_prefix, *ask, str(place)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for host, place in zip(net.hosts, places, strict=True)
        ]
        said = [machine.communicate(timeout=120) for machine in machines]
        addresses = [host.address for host in net.hosts]
    assert [machine.returncode for machine in machines] == [0, 0, 0], said
    told = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert [each.pop("here") for each in told] == places
    assert told[0] == told[1] == told[2]
    assert [machine["address"] for machine in told[0]["machines"]] == [addresses[i] for i in (0, 2, 1)]
    far = (FAR[0], NEAR[1] + FAR[1])
    for link in told[0]["links"]:
        rate, round_trip = {(0, 1): far, (0, 2): NEAR, (1, 2): FAR}[min(link["from"], link["to"]), max(link["from"], link["to"])]
        assert link["mbit"] == pytest.approx(rate, rel=0.15)
        assert link["round_trip_ms"] == pytest.approx(round_trip, abs=5.0)
    assert len(told[0]["links"]) == 6
    assert told[0]["order"] in ([0, 2, 1], [1, 2, 0])
    step = told[0]["seconds_per_step"]
    assert step["reordered"] < step["present"]
    assert 1 <= told[0]["rank"] <= 32
