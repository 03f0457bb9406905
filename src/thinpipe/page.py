"""`thinpipe report`: the plots of some runs as PNG, and one page that holds them and the figures behind them.

The page needs nothing but itself: no script, no font, no address. Its pictures are the PNG files, as data: a curve of many
steps is a few kilobytes of PNG and megabytes of SVG.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from .config import Config, ThinpipeError, to_dict
from .data import entries, read_tokenizer
from .lab import Link, Measured, parse_links
from .metrics import write_whole
from .planner import Plan, draw_timeline, find_gpu, plan
from .report import Run, figures, read_runs, save, write_picture
from .run import TOKENIZER

_UNKNOWN = "–"
_MOST_SPANS = 40  # of refused steps
# Where a run ran says nothing about it, and a page is passed on.
_PRIVATE = {"run.dir", "run.prometheus", "network.rdzv", "network.addr", "network.node_rank", "network.nodes"}

_STYLE = """
:root { color-scheme: light dark }
body { font: 1rem/1.45 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 0 1rem 2rem; overflow-wrap: anywhere }
h1, h2, h3 { line-height: 1.2 }
h2 { margin-top: 2.5rem; border-top: 1px solid #8888; padding-top: 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
caption { text-align: left; padding: .3rem 0 }
th, td { padding: .2rem .7rem .2rem 0; border-bottom: 1px solid #8884; text-align: right; vertical-align: top; overflow-wrap: normal }
th:first-child, .text * { text-align: left }
thead th { min-width: 5rem; overflow-wrap: anywhere }
tbody th { font-weight: normal }
.box { overflow-x: auto; margin: 1rem 0 }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1.5rem; align-items: start }
figure, .plots { margin: 1rem 0; min-width: 0 }
.plots figure { margin: 0 }
img { display: block; width: 100%; max-width: 36rem; background: #fff }
.wide img { min-width: 44rem; max-width: 72rem }
figcaption, .note { font-size: .85rem }
pre { white-space: pre-wrap; border-left: 3px solid #8888; padding-left: .8rem }
@media print {
  :root { color-scheme: light }
  body { max-width: none; padding: 0; color: #000; background: #fff; font-size: 9.5pt }
  figure, table, pre { break-inside: avoid }
  h2, h3, caption { break-after: avoid }
  .box { overflow: visible }
  .plots { grid-template-columns: 1fr 1fr }
  img, .wide img { min-width: 0; width: auto; max-width: 100%; max-height: 22cm }
  a { color: inherit; text-decoration: none }
}
"""


class _Prediction(NamedTuple):
    plan: Plan
    over: str
    """The links, and how they are known."""


def report(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write the plots of some runs as PNG, and the page report.html, into the folder `out`.

    Returns {"files": [paths]}, the page last. Every file is written whole or not at all.

    Raises ThinpipeError if a folder is no run or has no step yet, or if `out` can't be written.
    """
    runs = read_runs(folders)
    predictions = {run.file: predicted for run in runs if (predicted := _predict(run)) is not None}
    pictures: dict[str, Path] = {}
    page = out / "report.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, figure in figures(runs):
            pictures[name] = out / f"{name}.png"
            save(figure, pictures[name])
        for file, predicted in predictions.items():
            timeline, name = predicted.plan.timeline, f"timeline-{file}"
            pictures[name] = out / f"{name}.png"
            title = f"Planned, not measured: one step, {timeline.seconds_per_step:.3g} s; beside each stage the share that it computes"
            write_picture(pictures[name], partial(draw_timeline, timeline, title=title))
        write_whole(page, _page(runs, predictions, {name: path.read_bytes() for name, path in pictures.items()}))
    except OSError as error:
        raise ThinpipeError(f"{out} can't be written: {error.strerror}; give another folder for the report") from None
    return {"files": [str(path) for path in (*pictures.values(), page)]}


def _predict(run: Run) -> _Prediction | None:
    """What the planner says of the run's step; None where there is no boundary or the config can't be planned (any more)."""
    if run.config is None or run.config.pipeline.stages == 1:
        return None
    try:
        pipeline = run.config.pipeline
        if pipeline.schedule == "auto":  # an earlier life may have chosen, and this one not
            pipeline = replace(pipeline, **{key: run.schedule[key] for key in ("schedule", "warmup") if key in run.schedule})
        config = replace(run.config, pipeline=pipeline)
        tokenizer = run.folder / TOKENIZER
        vocab = entries(read_tokenizer(str(tokenizer))) if tokenizer.is_file() else config.data.vocab
        links, over = _links(run, config)
        return _Prediction(plan(config, config.sizes().get("vocab", vocab), links, find_gpu("cpu" if run.lab else config.plan.gpu)), over)
    except ThinpipeError:
        return None


def _links(run: Run, config: Config) -> tuple[Sequence[Link], str]:
    """A link per boundary, and in words: those that the lab measured, else plan.link. Raises ThinpipeError for a text that is none."""
    boundaries = config.pipeline.stages - 1
    if not run.lab:
        return parse_links(config.plan.link, boundaries, "plan.link"), f"{config.plan.link} (plan.link)"
    from .trial import as_achieved  # with torch

    asked, achieved = (parse_links(str(run.lab.get(key)), boundaries, key) for key in ("link", "achieved_link"))
    measured = [Measured((link.up or math.inf) / 1e6, 2e3 * link.delay) for link in achieved]
    return as_achieved(asked, measured), f"{run.lab['achieved_link']} (measured in the lab)"


# The page


def _page(runs: Sequence[Run], predictions: Mapping[str, _Prediction], pictures: Mapping[str, bytes]) -> str:
    captions = {
        "loss-tokens": "Loss at equal tokens.",
        "loss-seconds": "Loss at equal training time.",
        "loss-bytes": "Loss at equal bytes sent over one boundary; where one stage holds the whole model, what a cut would send.",
    }
    plots = [_figure(pictures[name], caption) for name, caption in captions.items() if name in pictures]
    sections = [_section(i, run, predictions.get(run.file), pictures) for i, run in enumerate(runs)]
    title = _text(f"thinpipe: {', '.join(run.name for run in runs)}")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Report of {"a run" if len(runs) == 1 else f"{len(runs)} runs"}</h1>
{_headline(runs)}
<div class="plots">
{"".join(plots)}</div>
{"".join(sections)}</body>
</html>
"""


def _headline(runs: Sequence[Run]) -> str:
    """A row per measure that is known of any run, a column per run."""
    facts = [_facts(run) for run in runs]
    heads = ["", *(f'<a href="#run-{i}">{_text(run.name)}</a>' for i, run in enumerate(runs))]
    rows = [[name, *(each[name] for each in facts)] for name in facts[0] if any(each[name] != _UNKNOWN for each in facts)]
    note = "Wire bytes: payload per token, boundary and direction. Restarts: how often the run was gone on with."
    return _table(heads, rows) + f'<p class="note">{note}</p>\n'


def _facts(run: Run) -> dict[str, str]:
    loss = run.val_loss[-1] if run.val_loss.size else math.nan
    return {
        "method": run.method or _UNKNOWN,
        "stages": _number(run.stages),
        "steps": _number(run.step[-1]),
        "tokens": _number(run.tokens[-1]),
        "parameters": _number(run.result.get("parameters")),
        "validation loss": _number(loss, ".4f"),
        "perplexity": _number(math.exp(min(loss, 700.0)), ",.2f"),
        "seconds per step": _number(run.seconds_per_step, ".3g"),
        "tokens per second": _number(run.tokens_per_step / run.seconds_per_step),
        "wire bytes per token": _number(run.wire_per_token, ",g"),
        "the same, dense bfloat16": _number(run.dense_per_token, ",g"),
        "compression": _number(run.dense_per_token / run.wire_per_token, ".3g", "×"),
        "refused steps": _number(len(run.refused)),
        "restarts": _number(run.restarts),
    }


def _section(number: int, run: Run, predicted: _Prediction | None, pictures: Mapping[str, bytes]) -> str:
    """All that is known of one run."""
    parts = [f'<section id="run-{number}">\n<h2>{_text(run.label)}</h2>\n']
    if run.refused or run.complaints:
        parts.append(_troubles(run))
    if math.isfinite(run.wire.sum()):
        parts.append(_wire(run))
    if predicted is not None:
        parts.append(_figure(pictures[f"timeline-{run.file}"], _of_the_plan(run, predicted), wide=True))
    captions = {
        "ranks": "Stable rank, and share of the energy in the k strongest directions, of the matrices that write into the stream.",
        "moves": "What each move of the subspace did: share of the gradients' energy inside it, angles it turned by, loss on one batch.",
    }
    plots = [_figure(pictures[f"{kind}-{run.file}"], text) for kind, text in captions.items() if f"{kind}-{run.file}" in pictures]
    if plots:
        parts.append(f'<div class="plots">\n{"".join(plots)}</div>\n')
    if changed := _changed(run.raw):
        parts.append("<h3>Config that differs from the defaults</h3>\n" + _table(["field", "here", "default"], changed, "text"))
    if run.result.get("sample"):
        parts.append(f"<h3>What the model writes</h3>\n<pre>{_text(run.result['sample'])}</pre>\n")
    return "".join(parts) + "</section>\n"


def _troubles(run: Run) -> str:
    items = [text if text.startswith("step ") else f"step {step}: {text}" for step, text in run.complaints]
    if run.refused:
        items.insert(0, f"refused, since loss or gradient norm was not finite: {_spans(run.refused)}")
    return "<h3>Complaints</h3>\n<ul>\n" + "".join(f"<li>{_text(item)}</li>\n" for item in items) + "</ul>\n"


def _spans(steps: Sequence[int]) -> str:
    """Such as "steps 3, 7–9"."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    shown = ", ".join(f"{first}–{last}" if last > first else f"{first}" for first, last in spans[:_MOST_SPANS])
    return f"step{'s' * (len(steps) > 1)} {shown}{', …' * (len(spans) > _MOST_SPANS)}"


def _wire(run: Run) -> str:
    boundaries = (run.stages or 1) - 1
    where = f"each of {boundaries} boundaries" if boundaries > 1 else "the boundary" if boundaries else "a cut, if it were sent"
    rows = [[run.method or "this run", *map(_number, run.wire)]]
    if math.isfinite(run.dense_per_token):
        rows.append(["dense, bfloat16", *[_number(run.dense_bytes)] * 2])
    tied = run.result.get("tied_bytes_per_step")
    note = f'<p class="note">Beside it {_number(tied)} bytes for the tied table, over all stages.</p>\n' if tied else ""
    return _table(["", "forward", "backward"], rows, caption=f"Bytes of a step over {where}") + note


def _of_the_plan(run: Run, predicted: _Prediction) -> str:
    p = predicted.plan
    warmup = "" if p.warmup is None else f", warm-up {p.warmup}"
    told = (
        f"Planned by simulation, not measured: schedule {p.schedule}{warmup} over {predicted.over}, compute of {p.gpu} by formula. "
        f"{_number(p.seconds_per_step, '.3g')} s a step, bound by {p.bound}."
    )
    if not run.lab:  # then the run had other links, if any
        return told
    planned, took = (_number(run.lab.get(key), ".3g") for key in ("planned_seconds_per_step", "seconds_per_step"))
    return f"{told} With compute as measured the lab planned {planned} s; a step took {took} s."


def _changed(raw: Mapping[str, Any]) -> list[list[str]]:
    """Field, value and default of what a stored config has otherwise than the defaults."""
    usual = to_dict(Config())
    fields = [(f"{group}.{key}", value, usual.get(group, {}).get(key)) for group, values in raw.items() for key, value in values.items()]
    return [
        [name, json.dumps(value, ensure_ascii=False), "" if default is None else json.dumps(default, ensure_ascii=False)]
        for name, value, default in fields
        if value != default and name not in _PRIVATE
    ]


# HTML


def _text(value: object) -> str:
    """Escaped; what is no Unicode, as in a file's name, shows as a question mark."""
    return escape(str(value).encode(errors="replace").decode())


def _number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    return _UNKNOWN if value is None or not math.isfinite(value) else f"{value:{form}}{unit}"


def _figure(picture: bytes, caption: str, wide: bool = False) -> str:
    """A PNG; a wide one scrolls in its own box where it would become too small to read."""
    data = base64.b64encode(picture).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{_text(caption)}">'
    image = f'<div class="box wide">{image}</div>' if wide else image
    return f"<figure>\n{image}\n<figcaption>{_text(caption)}</figcaption>\n</figure>\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", caption: str = "") -> str:
    """A table in a box of its own; `heads` are HTML, the cells below are text, the first of a row its heading."""
    title = f"<caption>{_text(caption)}</caption>\n" if caption else ""
    head = "".join(f'<th scope="col">{text}</th>' if text else "<td></td>" for text in heads)
    body = "".join(
        f'<tr><th scope="row">{_text(name)}</th>' + "".join(f"<td>{_text(value)}</td>" for value in values) + "</tr>\n"
        for name, *values in rows
    )
    return f'<div class="box"><table class="{kind}">\n{title}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n'
