"""What a run reports: one JSON object per line in metrics.jsonl, a progress bar on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import ThinpipeError


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


class Metrics:
    """Events of one run, written by its first stage.

    Args:
        path: metrics.jsonl; None writes nothing.
        steps: steps of the whole run, for the progress bar.
        start: step to go on from; events of later steps (of a life that was lost) are dropped from the file.
        quiet: no progress bar.
    """

    def __init__(self, path: Path | None, steps: int, start: int = 0, quiet: bool = False) -> None:
        self._file = None
        if path is not None:
            kept = [event for event in read_events(path) if event.get("step", 0) <= start]
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
        try:
            self._file.write(to_json({"event": kind, "time": round(time.time(), 3), **values}) + "\n")
            self._full = False
        except OSError as error:
            if not self._full:
                self.say(f"{self._file.name} can't be written: {error.strerror}; make room, training goes on")
            self._full = True

    def progress(self, step: int, text: str) -> None:
        """Show `text` beside the bar; where there is no terminal, as a line every few seconds."""
        self._progress.update(self._task, completed=step, text=text)
        if self._progress.disable and not self._quiet and time.monotonic() - self._spoke > 5:
            self._spoke = time.monotonic()
            print(f"step {step}  {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line for the person at the terminal."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
