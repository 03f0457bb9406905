"""Runs read from their metrics, and plots of them: loss over tokens, time and bytes, ranks by layer, moves of the subspace.

`figures` gives named matplotlib Figures, page.py makes files of them. They are 5 inches wide with 10-point text, so that they
can be read on a phone. Colours are Okabe and Ito's for runs and viridis for layers, which colour-blind readers tell apart.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

from .config import Config, ThinpipeError, from_dict
from .metrics import read_events
from .planner import message_bytes

WIDTH, DPI = 5.0, 200  # inches, dots per inch
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, PALE = "#333333", "#dddddd"
Against = Literal["tokens", "seconds", "bytes"]
LOSSES: tuple[Against, ...] = ("tokens", "seconds", "bytes")
WATCHED = ("weight", "gradient", "update")
WRITERS = {"attn.o": "attention output", "mlp.down": "MLP output"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the plots and the page need of a run.

    Attributes:
        name: its folder's name; label: the name with method and compression.
        raw: the config of its last life as its metrics hold it; config: the same as a Config (None: another version's, or
            it names a file that has gone).
        stages: of its last life (None: unknown); restarts: lives before that.
        step, loss, tokens, seconds, bytes: one entry per step; the loss is NaN where the step was refused; the last three are sums
            from the first step on: seconds without validation and saving (of the medians over the last 20 steps or fewer that
            the step events carry), bytes over one boundary, both directions.
        wire: bytes of the last step over one boundary, forward and backward. Like `bytes` counted where they were sent, by
            formula what a cut would send where one stage holds all, NaN where neither is known.
        wire_per_token: bytes per token, boundary and direction; dense_per_token: the same of the full stream in bfloat16.
        dense_bytes: of a step over one boundary, in one direction, for that stream.
        seconds_per_step: the result's, of an unfinished run its last step event's.
        val_step, val_loss: one entry per validation.
        refused: steps; complaints: steps and texts.
        ranks, moves: events of these kinds; schedule, result, lab: the last one's fields, empty where there is none.
    """

    name: str
    label: str
    folder: Path
    raw: dict[str, Any]
    config: Config | None
    stages: int | None
    restarts: int
    step: np.ndarray
    loss: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    bytes: np.ndarray
    wire: np.ndarray
    wire_per_token: float
    dense_per_token: float
    dense_bytes: float
    seconds_per_step: float
    val_step: np.ndarray
    val_loss: np.ndarray
    refused: list[int]
    complaints: list[tuple[int, str]]
    ranks: list[dict[str, Any]]
    moves: list[dict[str, Any]]
    schedule: dict[str, Any]
    result: dict[str, Any]
    lab: dict[str, Any]

    @property
    def method(self) -> str:
        return str(self.raw.get("compression", {}).get("method", ""))

    @property
    def file(self) -> str:
        """The name, fit for a file."""
        return self.name.replace("/", "-")

    @property
    def tokens_per_step(self) -> float:
        """Of all replicas."""
        return float(self.tokens[-1] / self.step[-1])


def save(figure: Figure, path: Path) -> None:
    """Write a PNG whole or not at all. Raises OSError."""
    write_picture(path, lambda beside: figure.savefig(beside, dpi=DPI))


def write_picture(path: Path, write: Callable[[Path], None]) -> None:
    """Have a PNG written whole or not at all: `write` gets the path of a file beside it. Raises OSError.

    A palette makes it three times smaller and looks the same.
    """
    beside = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(beside)
        with Image.open(beside) as picture:
            small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        small.save(beside, format="PNG")
        beside.replace(path)
    except OSError as error:
        error.filename = str(path)  # the one that was asked for
        raise
    finally:
        beside.unlink(missing_ok=True)


def figures(runs: Sequence[Run]) -> Iterator[tuple[str, Figure]]:
    """Name (fit for a file) and Figure of every plot that the runs have events for."""
    for against in LOSSES:
        if any(np.isfinite(getattr(run, against)[-1]) for run in runs):
            yield f"loss-{against}", loss_figure(runs, against)
    for run in runs:
        if run.ranks:
            yield f"ranks-{run.file}", ranks_figure(run)
        if run.moves:
            yield f"moves-{run.file}", moves_figure(run)


# Reading


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Runs in the order given, each once, named by as much of their paths as tells them apart.

    Raises ThinpipeError that names the folder that is no run or has no step yet.
    """
    whole = {folder.resolve(): folder for folder in folders}
    if not whole:
        raise ThinpipeError("no run to report on; give the folder of at least one, such as runs/demo-1")
    paths = list(whole)
    depth = next(n for n in range(1, 1000) if len({path.parts[-n:] for path in paths}) == len(paths))
    names = {path: "/".join(path.parts[-depth:]).encode(errors="replace").decode() for path in paths}  # a name may be no Unicode
    return [_read_run(folder, names[path]) for path, folder in whole.items()]


def _read_run(folder: Path, name: str) -> Run:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ThinpipeError(f"{folder} holds no metrics.jsonl; give the folder of a run, such as runs/demo-1")
    try:
        return _digest(folder, name, list(read_events(path)))
    except ThinpipeError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ThinpipeError(f"{path} is damaged ({type(error).__name__}: {error})") from None


def _digest(folder: Path, name: str, events: list[dict[str, Any]]) -> Run:
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        kinds[str(event.get("event"))].append(event)
    columns = _columns(kinds["step"], "step", "loss", "tokens", "seconds", "refused")
    if not np.isfinite(columns["loss"]).any():
        raise ThinpipeError(f"{folder} has no training step with a loss yet; train it first: thinpipe train --run.dir {folder}")
    evals = _columns(kinds["eval"], "step", "val_loss")
    validated = np.isfinite(evals["val_loss"])
    start, result, schedule = (kinds[kind][-1] if kinds[kind] else {} for kind in ("start", "result", "schedule"))
    raw = start.get("config") or {}
    config = _readable(raw)
    wire = _wire(events)
    # The bytes are one replica's, and so must the tokens be: those of all can't be shared out, since a replica may have been away.
    share = config.share * config.sizes()["context"] if config is not None else columns["tokens"][-1] / columns["step"][-1]
    per_token = wire[-1].sum() / (2 * share)
    if not np.isfinite(per_token):
        per_token = result.get("wire_bytes_per_token") or math.nan
    dense = 2.0 * config.sizes()["width"] if config is not None else result.get("dense_wire_bytes_per_token") or math.nan
    ended = result.get("step") == kinds["step"][-1].get("step")
    method = raw.get("compression", {}).get("method", "")
    refusals = np.diff(np.nan_to_num(columns["refused"]), prepend=0) > 0
    return Run(
        name=name,
        label=f"{shortened(name)} · {method} {_compression(raw, dense / per_token)}".strip(" ·"),
        folder=folder,
        raw=raw,
        config=config,
        stages=start.get("stages"),
        restarts=max(0, len(kinds["start"]) - 1),
        step=columns["step"],
        loss=columns["loss"],
        tokens=columns["tokens"],
        seconds=np.cumsum(np.nan_to_num(columns["seconds"])),
        bytes=np.cumsum(wire.sum(axis=1)),
        wire=wire[-1],
        wire_per_token=per_token,
        dense_per_token=dense,
        dense_bytes=dense * share,
        seconds_per_step=(result.get("seconds_per_step") if ended else None) or columns["seconds"][-1],
        val_step=evals["step"][validated],
        val_loss=evals["val_loss"][validated],
        refused=[int(step) for step in columns["step"][refusals]],
        complaints=[(event.get("step", 0), str(event.get("text"))) for event in kinds["complaint"]],
        # Those that a broken disk has left whole enough to be drawn.
        ranks=[event for event in kinds["ranks"] if isinstance(event.get("k"), int) and isinstance(event.get("matrices"), dict)],
        moves=[event for event in kinds["move"] if isinstance(event.get("angles"), list)],
        schedule=schedule,
        result=result,
        lab=_read_object(folder / "lab.json"),
    )


def _columns(events: list[dict[str, Any]], *keys: str) -> dict[str, np.ndarray]:
    """One float array per key; what is null or missing is NaN."""
    return {key: np.array([event.get(key) for event in events], dtype=float) for key in keys}


def _read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; an empty one where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _readable(raw: dict[str, Any]) -> Config | None:
    """A stored config; None if there is none, a field is another version's, or the hf_config that it names has gone."""
    try:
        return from_dict(raw).check() if raw else None
    except ThinpipeError:
        return None


def _wire(events: Iterable[dict[str, Any]]) -> np.ndarray:
    """Bytes of each step over one boundary, (steps, 2): forward and backward; see Run.wire. A run may change its stages."""
    boundaries = math.nan
    formula = [math.nan, math.nan]
    rows = []
    for event in events:
        if event.get("event") == "start":
            boundaries = event.get("stages", math.nan) - 1
            config = _readable(event.get("config") or {})
            formula = [size * config.pipeline.micro_batches for size in message_bytes(config)] if config else [math.nan, math.nan]
        elif event.get("event") == "step":
            counted = [event.get(key) or math.nan for key in ("wire_forward", "wire_backward")]
            rows.append([size / boundaries for size in counted] if boundaries else formula)
    return np.array(rows, dtype=float)


def shortened(name: str, most: int = 28) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _compression(raw: dict[str, Any], ratio: float) -> str:
    """Such as "8×", against a dense bfloat16 stream; the rank where the bytes aren't known."""
    if np.isfinite(ratio):
        return f"{ratio:.3g}×"
    compression = raw.get("compression", {})
    return f"rank {compression.get('rank')}" if compression.get("method", "none") != "none" else ""


# Loss


def loss_figure(runs: Sequence[Run], against: Against) -> Figure:
    """Training loss, lightly smoothed (lines), and validation loss (circles) of all runs over what they took of something.

    Runs of which that isn't known are left out.
    """
    figure = Figure(figsize=(WIDTH, 3.7 + 0.22 * len(runs)), layout="constrained")
    axes = figure.add_subplot()
    clean(axes)
    unit, unit_name = _time_unit(max(run.seconds[-1] for run in runs)) if against == "seconds" else (1.0, "")
    low, high = _loss_range(runs)
    handles, ends = [], []
    for i, run in enumerate(runs):
        x = getattr(run, against) / unit
        known = np.isfinite(run.loss) & np.isfinite(x)
        if not known.any():
            continue
        ends.append(x[known][-1])
        style, again = look(i), i >= len(COLOURS)
        dot = "." if known.sum() == 1 else None
        axes.plot(x[known], _smooth(run.loss[known]), linewidth=1.2, alpha=0.7, marker=dot, **style)
        face, edge = ("white", style["color"]) if again else (style["color"], "white")
        shown = run.val_loss <= high
        at = np.interp(run.val_step[shown], run.step, x)
        axes.plot(at, run.val_loss[shown], "o", markerfacecolor=face, markeredgecolor=edge, markersize=7, zorder=3, clip_on=False)
        final = f" · validation {run.val_loss[-1]:.3f}" if run.val_loss.size else ""
        handles.append(Line2D([], [], linewidth=2, label=literal(run.label + final), **style))
    axes.set_ylim(low, high)
    axes.set_ylabel("loss (nats per token)")
    if against == "bytes" and max(ends) > 4 * min(ends):  # a compressed run's line would be squeezed against the axis
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    if against == "seconds":
        axes.set_xlabel(f"training time ({unit_name}), without validation and saving")
    else:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("training tokens" if against == "tokens" else "bytes over one boundary, both directions")
    axes.set_title("lines: training, smoothed · circles: validation", loc="right", fontsize=8, color=INK)
    draw_legend(figure, handles)
    return figure


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over 2 % of the steps around each; near the start over as many behind as before it, since the loss falls fast there."""
    count = len(values)
    i, half = np.arange(count), max(1, count // 100)
    before = np.minimum(i, half)
    low, high = i - before, i + np.minimum(before, count - 1 - i) + 1
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[high] - sums[low]) / (high - low)


def _loss_range(runs: Sequence[Run]) -> tuple[float, float]:
    """Limits of the loss axis: the plunge of the first tenth would flatten all that follows, and so would a run that diverges."""
    late = [run.loss[len(run.loss) // 10 :] for run in runs]
    shown = np.concatenate([*late, *(run.val_loss for run in runs)])
    begun = max(run.loss[np.isfinite(run.loss)][0] for run in runs)
    kept = shown[shown <= 1.2 * begun]
    kept = kept if kept.size else np.append(shown[np.isfinite(shown)], begun)
    low, high = kept.min(), kept.max()
    margin = 0.05 * (high - low) or 0.1
    return float(low - margin), float(high + margin)


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds < 300 else (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")


# Ranks


def ranks_figure(run: Run) -> Figure:
    """Stable rank and energy in the top k of the residual-writing matrices, their gradients and updates; a line per layer."""
    k = run.ranks[-1]["k"]
    layers, writers = (sorted(set(found)) for found in zip(*map(_layer_and_writer, run.ranks[-1]["matrices"]), strict=True))
    colours = dict(zip(layers, matplotlib.colormaps["viridis"](np.linspace(0, 0.88, len(layers))), strict=True))
    figure = Figure(figsize=(WIDTH, 10.6), layout="constrained")
    parts: Any = figure.subfigures(3, 1, height_ratios=(0.6, 5, 5))
    _title(parts[0], run.label)
    shown = [layers[i] for i in sorted({round(j) for j in np.linspace(0, len(layers) - 1, 8)})]
    handles = [Line2D([], [], linestyle="none", label="layer")]
    handles += [Line2D([], [], color=colours[layer], linewidth=3, label=str(layer)) for layer in shown]
    legend: dict[str, Any] = {"frameon": False, "handlelength": 1, "columnspacing": 1, "fontsize": 9, "labelcolor": INK}
    parts[0].legend(handles=handles, loc="lower left", ncols=len(handles), **legend)
    note = "; constrained: at most k" if run.method == "subspace" else ""
    _rank_panels(parts[1], f"Stable rank (dotted: k = {k}{note})", run, writers, colours, 0)
    note = " (constrained: all)" if run.method == "subspace" else ""
    _rank_panels(parts[2], f"Energy in the top k = {k} directions{note}", run, writers, colours, 1)
    return figure


def _layer_and_writer(name: str) -> tuple[int, str]:
    """(3, "attn.o") of "layers.3.attn.o.weight"."""
    _, layer, writer = name.removesuffix(".weight").split(".", 2)
    return int(layer), writer


def _rank_panels(part: SubFigure, title: str, run: Run, writers: list[str], colours: dict[int, Any], measure: int) -> None:
    """A row per watched quantity, a column per writer; `measure` is the entry of the pair in the event."""
    _title(part, title)
    grid = part.subplots(len(WATCHED), len(writers), sharex=True, sharey=True, squeeze=False)
    steps = [event["step"] for event in run.ranks]
    for row, watched in zip(grid, WATCHED, strict=True):
        row[0].set_ylabel(watched)
        for axes, writer in zip(row, writers, strict=True):
            clean(axes)
            for layer, colour in colours.items():
                name = f"layers.{layer}.{writer}.weight"
                pairs = [event["matrices"].get(name, {}).get(watched, [None, None]) for event in run.ranks]
                values = np.array([pair[measure] for pair in pairs], dtype=float)
                axes.plot(steps, values, color=colour, linewidth=1.3, marker="o" if len(steps) < 8 else None, markersize=3)
            if measure == 0:
                axes.axhline(run.ranks[-1]["k"], color=INK, linewidth=1, linestyle=":")
    for axes, writer in zip(grid[0], writers, strict=True):
        axes.set_title(WRITERS.get(writer, writer), fontsize=9, color=INK)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    if measure == 0:
        axes.set_yscale("log")
        axes.set_ylim(bottom=1)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.05)
        axes.set_yticks([0, 0.5, 1])
        axes.yaxis.set_major_formatter(_percent)


# Moves


def moves_figure(run: Run) -> Figure:
    """What each move of the subspace did: captured gradient energy, the angles it turned by, the loss on one batch."""
    figure = Figure(figsize=(WIDTH, 7.0), layout="constrained")
    _title(figure, run.label)
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    step = [move["step"] for move in run.moves]
    values = _columns(run.moves, "energy_before", "energy_after", "loss_before", "loss_after")
    blue = COLOURS[0]
    clean(top)
    top.vlines(step, values["energy_before"], values["energy_after"], color=blue, linewidth=1.5)
    top.plot(step, values["energy_before"], "o", color=blue, markerfacecolor="white", label="before the move")
    top.plot(step, values["energy_after"], "o", color=blue, label="after it")
    top.set_ylim(bottom=0)
    top.yaxis.set_major_formatter(_percent)
    top.set_ylabel("captured energy\nof the gradients")
    top.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9, labelcolor=INK, handletextpad=0.2)
    clean(middle)
    for move in run.moves:
        angles = np.rad2deg(move["angles"])
        middle.plot(np.full(len(angles), move["step"]), angles, "_", color=blue, markersize=9, alpha=0.6)
    middle.set_ylim(bottom=0)
    middle.set_ylabel("principal\nangles (°)")
    clean(bottom)
    bottom.axhline(0, color=INK, linewidth=0.8)
    bottom.vlines(step, 0, values["loss_after"] - values["loss_before"], color=blue, linewidth=1.5)
    bottom.plot(step, values["loss_after"] - values["loss_before"], "o", color=blue)
    bottom.set_ylabel("change of loss\n(nats per token)")
    bottom.set_xlabel("step")
    bottom.set_xlim(0, 1.03 * run.step[-1])
    return figure


# Looks


def _title(figure: Figure | SubFigure, text: str) -> None:
    figure.suptitle(literal(text), x=0.02, ha="left", color=INK, fontsize=10, fontweight="bold")


def literal(text: str) -> str:
    """Text that matplotlib shows as it is: what stands between dollar signs would be a formula."""
    return text.replace("$", r"\$")


def _percent(share: float, position: int | None = None) -> str:
    return f"{100 * share:g}%"


def look(number: int) -> dict[str, Any]:
    """Colour and line of a plot's curve of that number, from 0: the first 28 differ."""
    again, colour = divmod(number, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": ("-", "--", ":", "-.")[again % 4]}


def draw_legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """A line for each curve, above the plot."""
    figure.legend(handles=handles, loc="outside upper left", frameon=False, labelcolor="linecolor", fontsize=9, handlelength=2.4)


def clean(axes: Axes) -> None:
    """Two thin spines, faint horizontal lines, few ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9, length=3)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(axis="y", color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
