"""What a run reports while it trains: TensorBoard's files, the endpoint, and bytes that a restart does not forget."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import small_tmpfs, tiny
from tensorboardX.proto.event_pb2 import Event, SessionLog

from thinpipe.config import ThinpipeError, from_dict
from thinpipe.metrics import Metrics, read_events
from thinpipe.run import open_run
from thinpipe.status import status
from thinpipe.topology import connect
from thinpipe.trainer import Trainer


def records(folder: Path) -> Iterator[Event]:
    """The records of a folder's event files in turn: length, its checksum, the record, its checksum."""
    for path in sorted(folder.iterdir()):
        assert ".tfevents." in path.name
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """What TensorBoard shows by tag and step: the start of a file hides all that came before it of that step or later."""
    shown: dict[tuple[str, int], float] = {}
    for event in records(folder):
        if event.session_log.status == SessionLog.START:
            shown = {key: value for key, value in shown.items() if key[1] < event.step}
        for value in event.summary.value:
            assert (value.tag, event.step) not in shown
            shown[value.tag, event.step] = value.simple_value
    return shown


def step(metrics: Metrics, number: int, loss: float | None = 2.0) -> None:
    sizes = {"tokens": 256 * number, "tokens_per_s": 512.0, "wire_forward": 100, "wire_backward": 300}
    metrics.event("step", step=number, loss=loss, seconds=0.5, refused=0, **sizes)


def test_a_run_is_watched(tmp_path: Path, corpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """While it trains, and in a second life at the same port, which begins before the end of the first."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    seen: list[dict[str, Any]] = []
    original = Trainer.train_step

    def train_step(self: Trainer, step: int) -> Any:
        seen.append(status(address))
        if step == 4 and len(seen) == 5:
            self.metrics.close()
            raise KeyError("lost")
        return original(self, step)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    watched = {"dir": str(tmp_path / "run"), "tensorboard": True, "prometheus": address}
    config, folder, _ = open_run(from_dict(tiny(data=corpus, run=watched, train={"checkpoint_every": 3})))
    with connect(30) as alone:
        with pytest.raises(KeyError):
            Trainer(config, alone, folder).fit()
        assert Trainer(config, alone, folder).fit() is not None
    assert [told["step"] for told in seen] == [0, 1, 2, 3, 4, 3, 4, 5]
    assert [told["restarts"] for told in seen] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert seen[4]["run"] == str(folder) and seen[4]["steps"] == 6 and seen[4]["checkpoint"] in (None, 3) and seen[5]["checkpoint"] == 3
    events = list(read_events(folder / "metrics.jsonl"))
    told = {event["step"]: event for event in events if event["event"] == "step"}
    assert [s["loss"] for s in seen] == [None, *(told[n]["loss"] for n in (1, 2, 3, 4, 3, 4, 5))]
    shown = scalars(folder / "tensorboard")
    for name in ("loss", "norm", "lr", "wire_forward", "tokens"):
        assert [shown[f"step/{name}", n] for n in told] == pytest.approx([event[name] for event in told.values()])
    assert shown["step/tokens_per_s", 6] == pytest.approx(256 / told[6]["seconds"])
    assert [shown["eval/val_loss", n] for n in (3, 6)] == pytest.approx([e["val_loss"] for e in events if e["event"] == "eval"])
    with pytest.raises(ThinpipeError, match="can't be reached"):
        status(address)
    assert status(folder)["finished"]


def test_bytes_of_lost_steps_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    config = {"compression": {"method": "subspace"}, "train": {"steps": 9}}
    for start, end in ((0, 5), (3, 7), (2, 3)):
        metrics = Metrics(path, 9, start, quiet=True)
        metrics.event("start", step=start, config=config, stages=2)
        for number in range(start, end):
            step(metrics, number + 1)
        metrics.close()
    told = metrics.standing.told("run", None)
    assert (told["total_bytes_forward"], told["total_bytes_backward"], told["step"]) == (1000, 3000, 3)
    assert status(tmp_path) | {"run": "run", "silent_s": 0} == told | {"silent_s": 0}
    assert [event["step"] for event in read_events(path) if event["event"] == "step"] == [1, 2, 3]


def test_tensorboard_itself_hides_lost_steps(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, loss in ((0, 2.0), (3, 1.0)):
        metrics = Metrics(tmp_path / "metrics.jsonl", 9, start, quiet=True, tensorboard=tmp_path / "board")
        for number in range(start + 1, start + 6):
            step(metrics, number, None if number == 5 else loss)
        metrics.close()
    read = accumulator.EventAccumulator(str(tmp_path / "board")).Reload()
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("step/loss")] == [(1, 2), (2, 2), (3, 2), (4, 1), (6, 1), (7, 1), (8, 1)]
    assert read.Scalars("step/tokens_per_s")[0].value == 512


def test_tensorboard_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    Metrics(tmp_path / "metrics.jsonl", 9, quiet=True).close()
    with pytest.raises(ThinpipeError, match=r"run\.tensorboard needs tensorboardX; pip install 'thinpipe\[tensorboard\]'"):
        Metrics(tmp_path / "metrics.jsonl", 9, tensorboard=tmp_path / "board")
    monkeypatch.undo()
    (tmp_path / "board").write_text("")
    with pytest.raises(ThinpipeError, match=r"board can't be used: File exists; "):
        Metrics(tmp_path / "metrics.jsonl", 9, tensorboard=tmp_path / "board")


def test_neither_a_full_disk_nor_a_taken_port_ends_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small").mkdir()
    with small_tmpfs(tmp_path / "small", "16k"), socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        metrics = Metrics(tmp_path / "metrics.jsonl", 500, tensorboard=tmp_path / "small")
        metrics.serve(address, "run", lambda: None)
        for number in range(1, 501):
            step(metrics, number)
        metrics.close()
        assert len(list(read_events(tmp_path / "metrics.jsonl"))) == 500
    told = capsys.readouterr().err
    assert told.count("run.tensorboard can't be written: No space left on device; training goes on without it") == 1
    assert told.count(f"run.prometheus = '{address}' can't be served: Address already in use; training goes on without it") == 1
