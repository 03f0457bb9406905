"""`thinpipe race`: several configs on the same data, order, seed and links: what each reaches per token, second and byte.

The loss runs at full speed in one process: the model doesn't depend on its stages (METHOD.md section 4). The seconds of a
step come from a short run in the lab at steady state, as the public yardstick does it, or from the planner where no lab can run.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from .calibrate import calibrate
from .config import Config, NetworkConfig, ThinpipeError, load, to_dict
from .data import prepare
from .lab import unavailable
from .metrics import read_events, to_json, write_whole
from .planner import average_bytes, find_gpu, plan, tied_bytes_per_step, wire_bytes_per_token
from .report import INK, clean, draw_legend, literal, look, save, shortened
from .run import finished, open_run
from .runner import train
from .trial import lab_links, train_in_lab

_SAME = ("data", "model.context", "train.batch", "train.steps", "train.stop_at", "train.eval_batches", "run.seed")
_KEPT = ("train.steps", "train.stop_at", "train.eval_every", "train.eval_batches", "run.precision")  # of a run that is there
_LAB_STEPS = 12
_CALIBRATIONS = 3


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One config of a race.

    Attributes:
        name: of its file; config: as overridden; link: what joins its stages.
    """

    name: str
    config: Config
    link: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """An entry's validation loss, a row per seed.

    Attributes:
        steps: of the validations; losses: (seeds, validations), nats per token.
        seconds_per_step: over the entry's link; timed: "lab" or "planner".
        bytes_per_step: over all boundaries, both directions.
    """

    entry: Entry
    steps: np.ndarray
    losses: np.ndarray
    seconds_per_step: float
    timed: str
    bytes_per_step: float
    compression: float


def race(
    entries: Sequence[Entry],
    out: Path,
    *,
    target: float | None = None,
    seeds: int = 1,
    extend: int = 1,
    say: Callable[[str], None],
    timing: str = "auto",
    debug: bool = False,
) -> dict[str, Any]:
    """Train every entry for every seed, time its step, compare; the keys of `thinpipe race --json`.

    Runs live in `out` and are not repeated when they are finished, so that a race can be stopped and gone on with.

    Args:
        target: loss that counts (None: the first entry's final one, its mean over seeds).
        extend: who misses the target races once more, as a row of its own, with so many times the steps (its schedule stretched).
        timing: "lab", "planner", or "auto": the lab where it can run.

    Raises:
        ThinpipeError: configs that can't be compared (the field is named), or as training does.
    """
    if seeds < 1:
        raise ThinpipeError(f"--seeds {seeds} must be at least 1")
    if extend < 1:
        raise ThinpipeError(f"--extend {extend} must be at least 1, the times that a row which missed the target trains again")
    if target is not None and not math.isfinite(target):
        raise ThinpipeError(f"--target {target} is no loss; give a finite number")
    _check(entries)
    if timing == "auto":
        timing = "lab" if unavailable() is None else "planner"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ThinpipeError(f"--out {out} can't be used: {error.strerror}; give a folder that can be written") from None
    seconds = _time_steps(entries, out, timing, say, debug)
    curves = [_run(entry, out, seeds, per_step, timing, say, debug) for entry, per_step in zip(entries, seconds, strict=True)]
    first = curves[0]
    target = float(first.losses.mean(0)[-1]) if target is None else target
    if extend > 1:
        curves += [_extended(curve, extend, out, say, debug) for curve in curves if _time_to(curve, target)[0] is None]
    result = {"target_loss": target, "timed_by": timing, "rows": _rows(curves, target)}
    write_whole(out / "race.json", to_json(result))
    for name, figure in figures(curves, target):
        save(figure, out / f"{name}.png")
    return result | {"files": sorted(str(path) for path in out.glob("*.png"))}


def _check(entries: Sequence[Entry]) -> None:
    """Only what is compared may differ."""
    if len({entry.name for entry in entries}) < len(entries):
        raise ThinpipeError("two configs of the race have the same file name; rename one")
    for entry in entries:
        if not entry.config.check().train.eval_every:
            raise ThinpipeError(f"{entry.name}: train.eval_every = 0 gives no curve to compare; set it")
        stages, replicas = entry.config.pipeline.stages, entry.config.pipeline.replicas
        if stages * replicas == 1:
            raise ThinpipeError(f"{entry.name}: pipeline.stages = 1 has no link to race over; set the stages of the pipeline")
        lab_links(entry.config, entry.link, _where(entry))
        for name in _SAME:
            if _field(entry.config, name) != _field(entries[0].config, name):
                raise ThinpipeError(f"{name} differs between {entries[0].name} and {entry.name}; a race needs the same data and order")


def _where(entry: Entry) -> str:
    return f"--link or plan.link of {entry.name}"


def _field(config: Config, name: str) -> Any:
    group, _, field = name.partition(".")
    values = config.sizes() if group == "model" else to_dict(config)[group]
    return values.get(field) if field else {key: value for key, value in values.items() if key not in ("cache", "source")}


def _run(entry: Entry, out: Path, seeds: int, seconds_per_step: float, timing: str, say: Callable[[str], None], debug: bool) -> Curve:
    config = entry.config
    steps, losses = _learn(entry, out, seeds, say, debug)
    return Curve(
        entry=entry,
        steps=steps,
        losses=losses,
        seconds_per_step=seconds_per_step,
        timed=timing,
        bytes_per_step=_bytes_per_step(config, prepare(config).vocab),
        compression=2 * config.sizes()["width"] / wire_bytes_per_token(config),
    )


def _bytes_per_step(config: Config, vocab: int) -> float:
    """Over all boundaries and replicas, averages and a tied table's exchange included."""
    tokens, pipeline = config.train.batch * config.sizes()["context"], config.pipeline
    boundaries = wire_bytes_per_token(config) * tokens * (pipeline.stages - 1) * 2
    return boundaries + pipeline.replicas * tied_bytes_per_step(config, config.spec(vocab)) + average_bytes(config, vocab)


def _learn(entry: Entry, out: Path, seeds: int, say: Callable[[str], None], debug: bool) -> tuple[np.ndarray, np.ndarray]:
    """Steps and losses of the entry's validations, as in Curve."""
    config = entry.config
    alone = replace(config.pipeline, stages=1, schedule="wan")
    compression = replace(config.compression, segments=config.segments)
    rows: list[np.ndarray] = []
    steps = np.array([])
    for seed in range(config.run.seed, config.run.seed + seeds):
        folder = out / f"{entry.name}-{seed}"
        run = replace(config.run, dir=str(folder), seed=seed)
        whole = replace(config, run=run, pipeline=alone, compression=compression, network=NetworkConfig())  # on this machine alone
        before = load(folder / "config.toml") if (folder / "config.toml").is_file() else config
        for name in _KEPT:  # trained on, a shorter run would have its decay in it; what is finished isn't validated anew
            if (was := _field(before, name)) != (now := _field(config, name)):
                raise ThinpipeError(f"{folder} holds a run with {name} = {was} and the race has {now} now; give another --out")
        say(f"{entry.name}, seed {seed}")
        train(whole, say, debug)  # a finished run of the same config is only reported
        evals = {e["step"]: e["val_loss"] for e in read_events(folder / "metrics.jsonl") if e["event"] == "eval"}
        steps, losses = np.array(sorted(evals)), np.array([evals[step] for step in sorted(evals)], dtype=float)
        rows.append(losses)
    return steps, np.stack(rows)


def _extended(curve: Curve, times: int, out: Path, say: Callable[[str], None], debug: bool) -> Curve:
    config, train = curve.entry.config, curve.entry.config.train
    longer = replace(train, steps=times * train.steps, stop_at=train.stop_at and times * train.stop_at)
    entry = replace(curve.entry, name=f"{curve.entry.name} x{times}", config=replace(config, train=longer))
    steps, losses = _learn(entry, out, len(curve.losses), say, debug)
    return replace(curve, entry=entry, steps=steps, losses=losses)


def _time_steps(entries: Sequence[Entry], out: Path, timing: str, say: Callable[[str], None], debug: bool) -> list[float]:
    """Seconds of a step of each. Calibrations are repeated in turn: a machine that gets busier favours no row."""
    rounds = _CALIBRATIONS if timing == "planner" else 1
    found = [[_time_step(entry, out, timing, say, debug) for entry in entries] for _ in range(rounds)]
    return [median(each) for each in zip(*found, strict=True)]


def _time_step(entry: Entry, out: Path, timing: str, say: Callable[[str], None], debug: bool) -> float:
    config = entry.config
    if timing == "planner":
        links = lab_links(config, entry.link, _where(entry))[: max(1, config.pipeline.stages - 1)]
        return plan(config, prepare(config).vocab, links, find_gpu("cpu"), costs=calibrate(config, debug)).seconds_per_step
    every = config.average.every
    groups = to_dict(config)
    setting = [entry.link, {**groups, "run": [config.run.precision, config.run.device]}]
    folder = out / f"{entry.name}-lab-{zlib.crc32(to_json(setting).encode()):08x}"  # what was measured otherwise is measured again
    steps = max(_LAB_STEPS, 2 * every)
    train_config = replace(
        config.train, steps=steps, stop_at=None, eval_every=0, eval_batches=1, checkpoint_every=0, watch_every=0, sample=""
    )
    short, folder, _ = open_run(replace(config, run=replace(config.run, dir=str(folder)), train=train_config))
    if (done := finished(folder, short)) is not None:
        seconds = done.seconds_per_step
    else:
        say(f"{entry.name}: {steps} steps in the lab over {entry.link}")
        seconds = train_in_lab(short, entry.link, _where(entry), say, debug)["seconds_per_step"]
    if every:  # a median step has no average in it
        at = {event["step"]: event["time"] for event in read_events(folder / "metrics.jsonl") if event["event"] == "step"}
        return float(at[2 * every] - at[every]) / every
    return float(seconds)


def steps_to(target: float, steps: np.ndarray, losses: np.ndarray) -> float | None:
    """The step at which a curve first reaches `target`, between two validations by a straight line; None: never."""
    reached = np.flatnonzero(losses <= target)
    if not reached.size:
        return None
    i = int(reached[0])
    if i == 0:
        return float(steps[0])
    share = (losses[i - 1] - target) / (losses[i - 1] - losses[i])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def _rows(curves: Sequence[Curve], target: float) -> list[dict[str, Any]]:
    first_loss = curves[0].losses[:, -1].mean()
    times = [_time_to(curve, target) for curve in curves]
    rows = []
    for curve, (steps, seconds) in zip(curves, times, strict=True):
        final = curve.losses[:, -1]
        rows.append(
            {
                "name": curve.entry.name,
                "method": curve.entry.config.compression.method,
                "compression": curve.compression,
                "link": curve.entry.link,
                "final_val_loss": float(final.mean()),
                "final_val_loss_spread": float(final.max() - final.min()),
                "perplexity": math.exp(min(float(final.mean()), 700.0)),
                "steps": int(curve.steps[-1]),
                "gap_vs_first": float(final.mean() / first_loss - 1),
                "steps_to_target": steps,
                "seconds_per_step": curve.seconds_per_step,
                "time_to_target": seconds,
                "speedup_vs_first": times[0][1] / seconds if seconds and times[0][1] else None,
            }
        )
    return rows


def _time_to(curve: Curve, target: float) -> tuple[float | None, float | None]:
    """Steps and seconds until the mean over seeds is at the target; None if it never is."""
    steps = steps_to(target, curve.steps, curve.losses.mean(0))
    return steps, None if steps is None else steps * curve.seconds_per_step


def figures(curves: Sequence[Curve], target: float) -> list[tuple[str, Figure]]:
    """Validation loss (mean over seeds, band from the best to the worst) against tokens, seconds over the links, and bytes sent."""
    tokens = [c.entry.config.train.batch * c.entry.config.sizes()["context"] for c in curves]
    axes: dict[str, tuple[str, list[float]]] = {
        "loss-tokens": ("training tokens", [float(t) for t in tokens]),
        "loss-seconds": (f"seconds over the links (a step's time from the {curves[0].timed})", [c.seconds_per_step for c in curves]),
        "loss-bytes": ("bytes sent over all boundaries", [c.bytes_per_step for c in curves]),
    }
    return [(name, _figure(curves, label, per_step, target)) for name, (label, per_step) in axes.items()]


def _figure(curves: Sequence[Curve], label: str, per_step: Sequence[float], target: float) -> Figure:
    figure = Figure(figsize=(5.0, 3.6 + 0.22 * len(curves)), layout="constrained")
    axes = figure.add_subplot()
    clean(axes)
    handles: list[Line2D] = []
    for i, (curve, unit) in enumerate(zip(curves, per_step, strict=True)):
        x, style = curve.steps * unit, look(i)
        name = literal(f"{shortened(curve.entry.name)} · {curve.compression:.3g}× · {curve.losses[:, -1].mean():.3f}")
        handles += axes.plot(x, curve.losses.mean(0), linewidth=1.5, marker="o", markersize=3, label=name, **style)
        if len(curve.losses) > 1:
            axes.fill_between(x, curve.losses.min(0), curve.losses.max(0), color=style["color"], alpha=0.2, linewidth=0)
    axes.axhline(target, color=INK, linewidth=0.8, linestyle=":")
    late = np.concatenate([curve.losses[:, len(curve.steps) // 8 :].ravel() for curve in curves])
    begun = min((curve.losses[:, 0].mean() for curve in curves if math.isfinite(curve.losses[:, 0].mean())), default=math.inf)
    late = late[late <= 2 * begun]  # a row may diverge, or end in no number
    if late.size:
        axes.set_ylim(late.min() - 0.05, late.max() + 0.05)
    ends = [curve.steps[-1] * unit for curve, unit in zip(curves, per_step, strict=True)]
    if max(ends) > 20 * min(ends):
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # a scale brings its own
    axes.set_xlabel(label)
    axes.set_ylabel("validation loss (nats per token)")
    draw_legend(figure, handles)
    return figure
