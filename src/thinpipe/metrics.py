"""What a run reports: one JSON object per line in metrics.jsonl, a progress bar on stderr; TensorBoard and Prometheus on request."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import ThinpipeError
from .endpoint import Endpoint, expose
from .errors import tell
from .standing import Standing, wire_bytes


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity; null says "no number"."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def to_json(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False)


def write_whole(path: Path, text: str) -> None:
    """Write a file beside and rename it: a reader sees the old one or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    except OSError as error:
        error.filename = str(path)  # the one that is known
        raise
    finally:
        beside.unlink(missing_ok=True)


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a metrics.jsonl; lines that a kill cut short or that are damaged are left out.

    Raises ThinpipeError if the file is there and can't be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ThinpipeError(f"{path} can't be read: {error.strerror}; restore it, or move it away") from None
    for line in text.split("\n"):  # not splitlines, which also ends lines at signs that JSON leaves inside of texts
        with contextlib.suppress(ValueError, RecursionError):
            match json.loads(line):
                case {"event": str()} as event if isinstance(event.get("step", 0), int):
                    yield event


class TensorBoard:
    """The numbers of some events as scalars KIND/NAME, for TensorBoard.

    Args:
        folder: of its files, one for each life of the run.
        start: step to go on from; TensorBoard hides what earlier lives wrote of later steps.

    Raises ThinpipeError if tensorboardX is not installed or the folder can't be used; `hear` and `close` raise OSError.
    """

    _KINDS = ("step", "eval", "move")
    _EVERY = 30.0  # seconds after which what is written can be seen

    def __init__(self, folder: Path, start: int) -> None:
        try:
            # Not its SummaryWriter: on a full disk that one's thread dies, and training would wait for it for ever.
            from tensorboardX import RecordWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
        except ImportError:
            raise ThinpipeError("run.tensorboard needs tensorboardX; pip install 'thinpipe[tensorboard]', or leave it off") from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = RecordWriter(str(folder / f"events.out.tfevents.{time.time_ns()}"))
        except OSError as error:
            raise ThinpipeError(f"{folder} can't be used: {error.strerror}; move it away, or leave run.tensorboard off") from None
        self._new_event = Event
        self._flushed = time.monotonic()
        self._write(wall_time=time.time(), file_version="brain.Event:2")
        self._write(wall_time=time.time(), step=start + 1, session_log=SessionLog(status=SessionLog.START))

    def hear(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind not in self._KINDS:
            return
        numbers = {name: value for name, value in event.items() if isinstance(value, int | float) and name not in ("step", "time")}
        values = [{"tag": f"{kind}/{name}", "simple_value": value} for name, value in numbers.items()]
        self._write(wall_time=event["time"], step=event["step"], summary={"value": values})
        if time.monotonic() - self._flushed > self._EVERY:
            self._file.flush()
            self._flushed = time.monotonic()

    def _write(self, **fields: Any) -> None:
        self._file.write(self._new_event(**fields).SerializeToString())

    def close(self) -> None:
        self._file.close()


class Metrics:
    """Events of one run, written by its first stage.

    Args:
        path: metrics.jsonl; None writes nothing.
        steps: steps of the whole run, for the progress bar.
        start: step to go on from; events of later steps (of a life that was lost) are dropped from the file, but for
            an event "lost" with the bytes that they have sent.
        quiet: no progress bar.
        tensorboard: folder for TensorBoard's files; None writes none.

    Attributes:
        standing: how the run stands, from the events of all its lives.

    Raises ThinpipeError as TensorBoard does, or if `path` can't be read.
    """

    def __init__(self, path: Path | None, steps: int, start: int = 0, quiet: bool = False, tensorboard: Path | None = None) -> None:
        self._file = None
        self._endpoint: Endpoint | None = None
        self._board = None if tensorboard is None else TensorBoard(tensorboard, start)
        self.standing = Standing()
        if path is not None:
            kept = _without_lost(list(read_events(path)), start)
            self.standing = Standing(kept)
            write_whole(path, "".join(to_json(event) + "\n" for event in kept))
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives as long as the run
        self.console = Console(stderr=True, quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=steps, completed=start, text="")
        self._progress.start()
        self._quiet, self._spoke, self._full = quiet, 0.0, False

    def event(self, kind: str, **values: Any) -> None:
        """Write an event. A full disk costs events, never the run; those in the file's buffer follow when there is room."""
        if self._file is None:
            return
        event = _plain({"event": kind, "time": round(time.time(), 3), **values})
        self.standing.hear(event)
        if self._board is not None:
            try:
                self._board.hear(event)
            except OSError as error:  # after half a record a reader finds nothing more in that file: no use in going on with it
                self._close_board()
                self.say(f"run.tensorboard can't be written: {error.strerror}; training goes on without it, metrics.jsonl has all")
        try:
            self._file.write(to_json(event) + "\n")
            self._full = False
        except OSError as error:
            if not self._full:
                self.say(f"{self._file.name} can't be written: {error.strerror}; make room, training goes on")
            self._full = True

    def serve(self, address: str, run: str, checkpoint: Callable[[], int | None]) -> None:
        """Serve how the run stands as Prometheus text. An address that can't be had costs the endpoint, never the run.

        Args:
            address: IP:PORT.
            run: what to call the run.
            checkpoint: tells the newest one's step.
        """
        try:
            self._endpoint = Endpoint(address, lambda: expose(self.standing.told(run, checkpoint())))
        except OSError as error:
            self.say(f"run.prometheus = {address!r} can't be served: {error.strerror}; training goes on without it")

    def progress(self, step: int, text: str) -> None:
        """Show `text` beside the bar; where there is no terminal, as a line every few seconds."""
        self._progress.update(self._task, completed=step, text=text)
        if self._progress.disable and not self._quiet and time.monotonic() - self._spoke > 5:
            self._spoke = time.monotonic()
            tell(f"step {step}  {text}")

    def say(self, text: str) -> None:
        """A line for the person at the terminal."""
        with _terminal_may_be_gone():
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        with _terminal_may_be_gone():
            self._progress.stop()
        if self._endpoint is not None:
            self._endpoint.close()
        self._close_board()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _close_board(self) -> None:
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()
        self._board = None


def _terminal_may_be_gone() -> contextlib.suppress:
    """Around what rich writes, which ends the process where a pipe is closed: that costs the lines, not the run."""
    return contextlib.suppress(OSError, SystemExit)


def _without_lost(events: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """The events up to step `start`, and what the later steps' cost: they were trained, and are trained again."""
    kept = [event for event in events if event.get("step", 0) <= start]
    lost = [event for event in events if event.get("step", 0) > start and event["event"] in ("step", "lost")]
    if lost:
        forward, backward = (sum(sizes) for sizes in zip(*map(wire_bytes, lost), strict=True))
        kept.append({"event": "lost", "time": round(time.time(), 3), "step": start, "wire_forward": forward, "wire_backward": backward})
    return kept
