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
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

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
            sums from the first step on, seconds without validation and saving.
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
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                figure.savefig(beside, format="png", dpi=DPI)
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)
            files.append(str(path))
    except OSError as error:
        raise ThinpipeError(f"{out} can't be written: {error.strerror}; give another folder for the report") from None
    return {"files": files}


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
        label=" · ".join(part for part in (name, method, _compression(config, kinds)) if part),
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


def _compression(config: dict[str, Any], kinds: dict[str, list[dict[str, Any]]]) -> str:
    """Such as "8×", against a dense bfloat16 stream: the result's, else the last step's bytes', else just the rank."""
    if kinds["result"] and kinds["result"][-1].get("compression"):
        return f"{kinds['result'][-1]['compression']:.3g}×"
    first, last = kinds["step"][0], kinds["step"][-1]
    sent = last.get("wire_forward", 0) + last.get("wire_backward", 0)
    try:
        width = from_dict(config).sizes()["width"]
    except ThinpipeError:  # a hf_config that has gone, a field of another version
        width = None
    if sent and width:
        boundaries = kinds["start"][-1]["stages"] - 1
        tokens = last["tokens"] / last["step"] if last is not first else last["tokens"]
        return f"{2 * width * tokens * boundaries * 2 / sent:.3g}×"
    return f"rank {config['compression']['rank']}" if config.get("compression", {}).get("method", "none") != "none" else ""


# Loss


def loss_figure(runs: Sequence[Run], against: Literal["tokens", "seconds"]) -> Figure:
    """Training loss, lightly smoothed, and validation loss (circles) of all runs over tokens or training time."""
    figure, axes = _figure(3.8)
    unit, name = _time_unit(max(run.seconds[-1] for run in runs)) if against == "seconds" else (1.0, "")
    handles = []
    for i, run in enumerate(runs):
        x = getattr(run, against) / unit
        known = np.isfinite(run.loss)
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linestyle": "-" if i < len(COLOURS) else "--"}
        axes.plot(x[known], _smooth(run.loss[known]), linewidth=1.6, **style)
        at = np.interp(run.val_step, run.step, x)
        axes.plot(at, run.val_loss, "o", color=style["color"], markersize=6, markeredgecolor="white", zorder=3, clip_on=False)
        final = f", {run.val_loss[-1]:.3f}" if run.val_loss.size else ""
        handles.append(Line2D([], [], linewidth=2.5, label=f"{run.label}{final}", **style))
    axes.set_ylim(*_loss_range(runs))
    axes.set_xlim(left=0)
    axes.set_ylabel("loss (nats per token)")
    if against == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("training tokens")
    else:
        axes.set_xlabel(f"training time ({name}), without validation and saving")
    axes.legend(handles=handles, loc="upper right", frameon=False, labelcolor="linecolor", fontsize=9, handlelength=1.2)
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
    """Limits of the loss axis: the plunge of the first twentieth would flatten all that follows."""
    late = [run.loss[len(run.loss) // 20 :] for run in runs]
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
    matrices = [_layer_and_writer(name) for name in run.ranks[-1]["matrices"]]
    layers = sorted({layer for layer, _ in matrices})
    writers = sorted({writer for _, writer in matrices})
    figure = Figure(figsize=(WIDTH, 11.0), layout="constrained")
    head, stable, energy = figure.subfigures(3, 1, height_ratios=(0.8, 5, 5))
    colours = dict(zip(layers, matplotlib.colormaps["viridis"](np.linspace(0, 0.88, len(layers))), strict=True))
    shown = [layers[i] for i in sorted({round(j) for j in np.linspace(0, len(layers) - 1, 8)})]
    handles = [Line2D([], [], color=colours[layer], linewidth=3, label=str(layer)) for layer in shown]
    head.legend(handles=handles, title="layer", loc="lower center", ncols=8, frameon=False, handlelength=1, columnspacing=1, fontsize=9)
    head.suptitle(run.label, x=0.02, ha="left", color=INK, fontsize=11, fontweight="bold")
    _rank_panels(stable, f"stable rank (dotted: k = {k})", run, writers, colours, 0)
    _rank_panels(energy, f"energy in the top k = {k} directions", run, writers, colours, 1)
    return figure


def _layer_and_writer(name: str) -> tuple[int, str]:
    """(3, "attn.o") of "layers.3.attn.o.weight"."""
    _, layer, writer = name.removesuffix(".weight").split(".", 2)
    return int(layer), writer


def _rank_panels(part: SubFigure, title: str, run: Run, writers: list[str], colours: dict[int, Any], measure: int) -> None:
    """A row per watched quantity, a column per writer; `measure` is the entry of the pair in the event."""
    part.suptitle(title, x=0.02, ha="left", color=INK, fontsize=10)
    grid = part.subplots(len(WATCHED), len(writers), sharex=True, sharey="row", squeeze=False)
    steps = [event["step"] for event in run.ranks]
    k = run.ranks[-1]["k"]
    for row, watched in zip(grid, WATCHED, strict=True):
        for axes, writer in zip(row, writers, strict=True):
            _clean(axes)
            for layer, colour in colours.items():
                name = f"layers.{layer}.{writer}.weight"
                pairs = [event["matrices"].get(name, {}).get(watched, [None, None]) for event in run.ranks]
                values = np.array([pair[measure] for pair in pairs], dtype=float)
                axes.plot(steps, values, color=colour, linewidth=1.3, marker="o" if len(steps) < 8 else None, markersize=3)
            if axes in grid[0]:
                axes.set_title(WRITERS.get(writer, writer), fontsize=9, color=INK)
            if measure == 0:
                axes.axhline(k, color=INK, linewidth=0.8, linestyle=":")
                axes.set_ylim(bottom=0)
            else:
                axes.set_ylim(0, 1.04)
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        row[0].set_ylabel(watched)
    for axes in grid[-1]:
        axes.set_xlabel("step")


# Moves


def moves_figure(run: Run) -> Figure:
    """What each move of the subspace did: captured gradient energy before and after, and the angles it turned by."""
    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    figure.suptitle(run.label, x=0.02, ha="left", color=INK, fontsize=11, fontweight="bold")
    upper, lower = figure.subplots(2, 1, sharex=True)
    step = np.array([move["step"] for move in run.moves])
    energy = _columns(run.moves, "energy_before", "energy_after")
    _clean(upper)
    upper.vlines(step, energy["energy_before"], energy["energy_after"], color=COLOURS[0], linewidth=2)
    upper.plot(step, energy["energy_before"], "o", color=COLOURS[0], markerfacecolor="white", markersize=6, label="before the move")
    upper.plot(step, energy["energy_after"], "o", color=COLOURS[0], markersize=6, label="after it")
    upper.set_ylim(0, 1.04)
    upper.yaxis.set_major_formatter(PercentFormatter(1.0))
    upper.set_ylabel("captured energy")
    _clean(lower)
    for move in run.moves:
        angles = np.rad2deg(move["angles"])
        lower.plot(np.full(len(angles), move["step"]), angles, "o", color=COLOURS[0], markersize=3, alpha=0.4, markeredgewidth=0)
    lower.plot(step, [np.rad2deg(np.median(move["angles"])) for move in run.moves], "-", color=COLOURS[1])
    lower.set_ylim(bottom=0)
    lower.set_ylabel("principal angles (°)")
    lower.set_xlabel("step")
    upper.legend(frameon=False, fontsize=9, loc="upper right")
    return figure


# Looks


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    _clean(axes)
    return figure, axes


def _clean(axes: Axes) -> None:
    """Two thin spines, faint horizontal lines, few ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9, length=3)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(axis="y", color=PALE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
