"""A run over several machines, here two agents with an address each of this one's loopback; schedule = "auto"."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_command import command, finish, start, write
from torch.distributed import HashStore, TCPStore

from thinpipe.config import NetworkConfig, ThinpipeError
from thinpipe.meeting import Rendezvous, check_clock, give_up_silence, keep_time, meeting
from thinpipe.metrics import read_events
from thinpipe.topology import _stage_of, connect


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "metrics.jsonl") if event["event"] == "step"]


@pytest.mark.slow
def test_machines_take_their_places_and_auto_changes_no_number(tmp_path: Path, corpus: dict[str, Any]) -> None:
    path = str(write(tmp_path, corpus, pipeline={"stages": 4, "schedule": "auto"}))
    meet = ["--network.rdzv", f"127.0.0.1:{free_port()}", "--network.nodes", "2"]
    # The second place meets where it is itself; the first stage's machine is the other one.
    meet += ["--run.dir", "r", "--json"]
    machines = [
        start(tmp_path, "train", path, *meet, "--network.addr", f"127.0.0.{2 - rank}", "--network.node-rank", str(rank))
        for rank in range(2)
    ]
    (status, out, err), (other_status, other_out, other_err) = (finish(machine) for machine in machines)
    assert (status, other_status) == (0, 0), err + other_err
    result = json.loads(out.splitlines()[-1])
    assert result["stages"] == 4 and not other_out.strip(), "only the first stage's machine has the result"
    (choice,) = [event for event in read_events(tmp_path / "r/metrics.jsonl") if event["event"] == "schedule"]
    assert choice["schedule"] in ("wan", "gpipe", "1f1b") and "schedule: " in err and choice["why"].split()[0] in err
    status, _, err = command(tmp_path, "train", path, "--pipeline.schedule", "gpipe", "--run.dir", "alone")
    assert status == 0 and losses(tmp_path / "alone") == losses(tmp_path / "r") and len(losses(tmp_path / "r")) == 6, err
    assert "rdzv" not in (tmp_path / "r/config.toml").read_text()


@pytest.mark.slow
def test_two_machines_of_one_place_are_told(tmp_path: Path, corpus: dict[str, Any]) -> None:
    path = str(write(tmp_path, corpus, pipeline={"stages": 2}))
    meet = ["--network.rdzv", f"127.0.0.1:{free_port()}", "--network.nodes", "2", "--network.node-rank", "1"]
    machines = [start(tmp_path, "train", path, *meet, "--network.addr", f"127.0.0.{address}") for address in (1, 2)]
    for status, _, err in [finish(machine) for machine in machines]:
        assert status == 2 and "network.node_rank is the same on two machines" in err and "Traceback" not in err
        assert err.count("node_rank") == 1, err


def test_a_place_that_is_not_there_is_told() -> None:
    """Under torchrun, where the config doesn't say how many machines there are."""
    with pytest.raises(ThinpipeError, match=r"network\.node_rank = 3 names no place: with 1 machines the last is 0"):
        _stage_of(HashStore(), 0, 1, 3, None)


@pytest.mark.slow
def test_what_only_the_first_stage_has_reaches_the_others(tmp_path: Path, corpus: dict[str, Any]) -> None:
    """The corpus (data.source "first"), and the static embedding of the run whose basis this one begins with."""
    source = str(write(tmp_path, corpus, compression={"move_every": 2}))
    status, _, err = command(tmp_path, "train", source, "--run.dir", "source", "--run.seed", "3")
    assert status == 0, err
    meet = ["--network.rdzv", f"127.0.0.1:{free_port()}", "--network.nodes", "2", "--run.dir", "r", "--pipeline.stages", "2"]
    meet += ["--compression.init-from", "source", "--data.source", "first"]
    nowhere = ["--data.files", "nowhere/*.txt"]
    machines = [
        start(tmp_path, "train", source, *meet, "--network.addr", f"127.0.0.{1 + place}", "--network.node-rank", str(place), *more)
        for place, more in enumerate(([], nowhere))
    ]
    for status, _, err in [finish(machine) for machine in machines]:
        assert status == 0, err
    assert "static_seed = 3" in (tmp_path / "r/config.toml").read_text()


def test_a_config_that_differs_is_found_at_the_start(tmp_path: Path, corpus: dict[str, Any]) -> None:
    path = str(write(tmp_path, corpus, pipeline={"stages": 2}))
    meet = ["--network.rdzv", f"127.0.0.1:{free_port()}", "--network.nodes", "2", "--run.dir", "r"]
    more: dict[int, list[str]] = {1: [], 2: ["--optim.lr", "0.01"]}
    machines = [start(tmp_path, "train", path, *meet, "--network.addr", f"127.0.0.{each}", *more[each]) for each in (1, 2)]
    for status, _, err in [finish(machine) for machine in machines]:
        assert status == 2 and "optim.lr is 0.004 on" in err and "and 0.01 on" in err and "Traceback" not in err, err
    assert not (tmp_path / "r").exists()


def test_a_machine_that_does_not_come_is_waited_for_aloud_and_not_for_ever(tmp_path: Path, corpus: dict[str, Any]) -> None:
    path = str(write(tmp_path, corpus, pipeline={"stages": 2}))
    meet = ["--network.rdzv", f"127.0.0.1:{free_port()}", "--network.nodes", "2", "--network.patience", "6"]
    status, _, err = command(tmp_path, "train", path, *meet)
    assert status == 1 and "waiting for 1 of 2 machines; 127.0.0.1 here" in err and "did not meet at 127.0.0.1:" in err, err
    assert "within 6 s (network.patience)" in err and "Traceback" not in err


def test_a_meeting_that_can_not_be_is_told_before_anything_starts() -> None:
    port = free_port()
    with pytest.raises(ThinpipeError, match=r"no way to no-such-host\.invalid"):
        meeting(NetworkConfig(rdzv=f"no-such-host.invalid:{port}"), "m")
    with pytest.raises(ThinpipeError, match=r"can't listen on 192\.0\.2\.1:0 .*must be an address of this machine"):
        meeting(NetworkConfig(rdzv=f"127.0.0.1:{port}", addr="192.0.2.1"), "m")
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ThinpipeError, match="another run may use it"):
        meeting(NetworkConfig(rdzv=f"127.0.0.1:{port}"), "m")
    told: list[str] = []
    with pytest.raises(ThinpipeError, match=r"nobody listens after 1 s .*firewall"):
        meeting(NetworkConfig(rdzv=f"127.0.0.1:{port}", addr="127.0.0.2", patience=1.0), "m", say=told.append)
    assert told == [f"waiting for 127.0.0.1:{port} ([Errno 111] Connection refused) ..."]
    with socket.create_server(("127.0.0.1", port)):
        met = meeting(NetworkConfig(rdzv=f"127.0.0.1:{port}", addr="127.0.0.2", nodes=2), "m")
    assert meeting(NetworkConfig(rdzv=f"127.0.0.1:{port}", addr="localhost"), "m").is_host, "an address given by name"
    assert (met.address, met.is_host, met.nodes, met.name) == ("127.0.0.2", False, 2, "m")


@pytest.mark.parametrize("off", [0.0, 3600.0, -3600.0])
def test_a_clock_that_is_off_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keep_time(store)
    joiner = TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    real = time.time
    here = threading.get_ident()
    monkeypatch.setattr(time, "time", lambda: real() + (off if threading.get_ident() == here else 0.0))
    if not off:
        check_clock(joiner, "10.0.0.1:29400")
        return
    with pytest.raises(ThinpipeError, match=f"3600 s {'ahead of' if off > 0 else 'behind'} that of 10.0.0.1:29400; set both"):
        check_clock(joiner, "10.0.0.1:29400")


def test_a_silent_hosts_connection_is_given_up_after_seconds() -> None:
    """Else a machine that is cut off would wait for its kernel's retries: a quarter of an hour."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    joiner = TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    give_up_silence(f"127.0.0.1:{store.port}")
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == store.port:
                found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    assert found and set(found) == {10_000} and joiner.num_keys() >= 0


def test_a_meeting_that_is_over_leaves_its_port(tmp_path: Path) -> None:
    """A program that trains twice may meet twice at the same place."""
    endpoint = f"127.0.0.1:{free_port()}"
    for _ in range(2):
        Rendezvous.at(meeting(NetworkConfig(rdzv=endpoint), "m"), print).close(for_all=True)


def test_an_address_that_gloo_would_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second address of an interface, for one: Gloo would listen elsewhere, to all the world perhaps."""
    monkeypatch.setattr("thinpipe.topology.address_towards", lambda *_: "10.255.254.253")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ThinpipeError, match=r"10\.255\.254\.253 is not the first address of a network interface"), connect(5.0):
        pass
