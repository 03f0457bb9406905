"""Plots of runs, made from their metrics: loss over tokens and over time, ranks by layer, moves of the subspace.

`figures` gives named matplotlib Figures and `report` writes them as PNG; a page can embed the same Figures. They are 5 inches
wide with 10-point text, so that they can be read on a phone. Colours are Okabe and Ito's for runs and viridis for layers,
which colour-blind readers tell apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from .config import ThinpipeError, from_dict
from .metrics import read_events

WIDTH, DPI = 5.0, 200  # inches, dots per inch
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, PALE = "#333333", "#dddddd"
WATCHED = ("weight", "gradient", "update")
WRITERS = {"attn.o": "attention output", "mlp.down": "MLP output"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the plots need of a run.

    Attributes:
        name: its folder's name; label: the name with method and compression.
        constrained: before the last cut the matrices live in the subspace.
        step, loss, tokens, seconds: one entry per step; the loss is NaN where the step was refused; tokens and seconds are
            sums from the first step on, seconds without validation and saving (of the medians over the last 20 steps or fewer
            that the step events carry).
        val_step, val_loss: one entry per validation.
        ranks, moves: events of these kinds.
    """

    name: str
    label: str
    constrained: bool
    step: np.ndarray
    loss: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    val_step: np.ndarray
    val_loss: np.ndarray
    ranks: list[dict[str, Any]]
    moves: list[dict[str, Any]]


def report(runs: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write the plots of some runs as PNG into the folder `out`.

    Returns {"files": [paths]}.

    Raises ThinpipeError if a folder is no run or has no step yet, or if `out` can't be written.
    """
    loaded = read_runs(runs)
    files = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, figure in figures(loaded):
            path = out / f"{name}.png"
            save(figure, path)
            files.append(str(path))
    except OSError as error:
        raise ThinpipeError(f"{out} can't be written: {error.strerror}; give another folder for the report") from None
    return {"files": files}


def save(figure: Figure, path: Path) -> None:
    """Write a PNG whole or not at all. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(beside, format="png", dpi=DPI)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def figures(runs: Sequence[Run]) -> Iterator[tuple[str, Figure]]:
    """Name (fit for a file) and Figure of every plot that the runs have events for."""
    yield "loss-tokens", loss_figure(runs, "tokens")
    yield "loss-seconds", loss_figure(runs, "seconds")
    for run in runs:
        name = run.name.replace("/", "-")
        if run.ranks:
            yield f"ranks-{name}", ranks_figure(run)
        if run.moves:
            yield f"moves-{name}", moves_figure(run)


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
    return [_read_run(folder, "/".join(path.parts[-depth:])) for path, folder in whole.items()]


def _read_run(folder: Path, name: str) -> Run:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ThinpipeError(f"{folder} holds no metrics.jsonl; give the folder of a run, such as runs/demo-1")
    try:
        events = list(read_events(path))
    except OSError as error:
        raise ThinpipeError(f"{path} can't be read: {error.strerror}") from None
    kinds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("start", "step", "eval", "ranks", "move", "result")}
    for event in events:
        kinds.get(str(event.get("event")), []).append(event)
    columns = _columns(kinds["step"], "step", "loss", "tokens", "seconds")
    if not np.isfinite(columns["loss"]).any():
        raise ThinpipeError(f"{folder} has no training step with a loss yet; train it first: thinpipe train --run.dir {folder}")
    evals = _columns([event for event in kinds["eval"] if event.get("val_loss") is not None], "step", "val_loss")
    config = kinds["start"][-1].get("config", {}) if kinds["start"] else {}
    method = config.get("compression", {}).get("method", "")
    return Run(
        name=name,
        label=f"{_shortened(name)} · {method} {_compression(config, kinds)}".strip(" ·"),
        constrained=method == "subspace",
        step=columns["step"],
        loss=columns["loss"],
        tokens=columns["tokens"],
        seconds=np.cumsum(np.nan_to_num(columns["seconds"])),
        val_step=evals["step"],
        val_loss=evals["val_loss"],
        ranks=kinds["ranks"],
        moves=kinds["move"],
    )


def _columns(events: list[dict[str, Any]], *keys: str) -> dict[str, np.ndarray]:
    """One float array per key; what is null or missing is NaN."""
    return {key: np.array([event.get(key) for event in events], dtype=float) for key in keys}


def _shortened(name: str, most: int = 32) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _compression(config: dict[str, Any], kinds: dict[str, list[dict[str, Any]]]) -> str:
    """Such as "8×", against a dense bfloat16 stream: by the result, else by the bytes of the last step, else just the rank."""
    if kinds["result"] and kinds["result"][-1].get("compression"):
        return f"{kinds['result'][-1]['compression']:.3g}×"
    compression, last = config.get("compression", {}), kinds["step"][-1]
    sent = last.get("wire_forward", 0) + last.get("wire_backward", 0)
    if config and sent:
        try:
            dense = 2 * from_dict(config).sizes()["width"] * last["tokens"] / last["step"]
            return f"{dense * (kinds['start'][-1]['stages'] - 1) * 2 / sent:.3g}×"
        except ThinpipeError:  # an hf_config that has gone, a field of another version
            pass
    return f"rank {compression.get('rank')}" if compression.get("method", "none") != "none" else ""


# Loss


def loss_figure(runs: Sequence[Run], against: Literal["tokens", "seconds"]) -> Figure:
    """Training loss, lightly smoothed (lines), and validation loss (circles) of all runs over tokens or training time."""
    figure = Figure(figsize=(WIDTH, 3.7 + 0.22 * len(runs)), layout="constrained")
    axes = figure.add_subplot()
    clean(axes)
    unit, unit_name = _time_unit(max(run.seconds[-1] for run in runs)) if against == "seconds" else (1.0, "")
    handles = []
    for i, run in enumerate(runs):
        x, known = getattr(run, against) / unit, np.isfinite(run.loss)
        colour, again = COLOURS[i % len(COLOURS)], i >= len(COLOURS)
        style: dict[str, Any] = {"color": colour, "linestyle": "--" if again else "-"}
        axes.plot(x[known], _smooth(run.loss[known]), linewidth=1.2, alpha=0.7, **style)
        face, edge = ("white", colour) if again else (colour, "white")
        at = np.interp(run.val_step, run.step, x)
        axes.plot(at, run.val_loss, "o", markerfacecolor=face, markeredgecolor=edge, markersize=7, zorder=3, clip_on=False)
        final = f" · validation {run.val_loss[-1]:.3f}" if run.val_loss.size else ""
        handles.append(Line2D([], [], linewidth=3, label=run.label + final, **style))
    axes.set_ylim(*_loss_range(runs))
    axes.set_xlim(left=0)
    axes.set_ylabel("loss (nats per token)")
    if against == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("training tokens")
    else:
        axes.set_xlabel(f"training time ({unit_name}), without validation and saving")
    axes.set_title("lines: training, smoothed · circles: validation", loc="right", fontsize=8, color=INK)
    figure.legend(handles=handles, loc="outside upper left", frameon=False, labelcolor="linecolor", fontsize=9, handlelength=1.2)
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
    """Limits of the loss axis: the plunge of the first tenth would flatten all that follows."""
    late = [run.loss[len(run.loss) // 10 :] for run in runs]
    shown = np.concatenate([*late, *(run.val_loss for run in runs)])
    shown = shown[np.isfinite(shown)] if np.isfinite(shown).any() else np.concatenate([run.loss for run in runs])
    low, high = np.nanmin(shown), np.nanmax(shown)
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


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
    note = "; constrained: at most k" if run.constrained else ""
    _rank_panels(parts[1], f"Stable rank (dotted: k = {k}{note})", run, writers, colours, 0)
    note = " (constrained: all)" if run.constrained else ""
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
    figure.suptitle(text, x=0.02, ha="left", color=INK, fontsize=10, fontweight="bold")


def _percent(share: float, position: int | None = None) -> str:
    return f"{100 * share:g}%"


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
