"""Plots of made-up runs: files that are pictures, no picture without events for it, one line for what is no run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from thinpipe.config import Config, ThinpipeError, to_dict
from thinpipe.report import figures, loss_figure, read_runs, report

PNG = b"\x89PNG\r\n\x1a\n"


def write(folder: Path, events: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def start(method: str = "subspace", stages: int = 1) -> dict[str, Any]:
    config = to_dict(Config())
    config["compression"] |= {"method": method, "rank": 16}
    return {"event": "start", "step": 0, "config": config, "stages": stages}


def steps(count: int, **more: Any) -> list[dict[str, Any]]:
    noise = np.random.default_rng(0).normal(size=count)
    return [
        {"event": "step", "step": s, "loss": 3 + 6 / (1 + s / 20) + 0.05 * noise[s - 1], "tokens": 4096 * s, "seconds": 1.5} | more
        for s in range(1, count + 1)
    ]


def ranks(step: int, layers: int, k: int = 16) -> dict[str, Any]:
    pairs = {kind: [1 + (step + i) % 20 + 1.5 * i, 0.5] for i, kind in enumerate(("weight", "gradient", "update"))}
    matrices = {f"layers.{i}.{writer}.weight": pairs for i in range(layers) for writer in ("attn.o", "mlp.down")}
    return {"event": "ranks", "step": step, "k": k, "matrices": matrices}


def move(step: int, k: int = 16) -> dict[str, Any]:
    angles = [0.01 * i for i in range(k)]
    return {
        "event": "move",
        "step": step,
        "energy_before": 0.2,
        "energy_after": 0.3,
        "angles": angles,
        "loss_before": 4.0,
        "loss_after": 4.1,
    }


def whole_run(folder: Path) -> Path:
    """Every kind of event; one step was refused, one rank has no figure, the last move has no energy after it yet."""
    events = [start(), *steps(60), {"event": "eval", "step": 30, "val_loss": 5.5}, {"event": "eval", "step": 60, "val_loss": 4.6}]
    events += [*(ranks(s, 6) for s in range(1, 60, 5)), move(20), move(40) | {"energy_after": None}]
    events += [{"event": "complaint", "text": "?"}, {"event": "result", "compression": 8.0}]
    events[5]["loss"] = None
    ranked = next(event for event in events if event["event"] == "ranks")
    ranked["matrices"]["layers.0.attn.o.weight"] = {"weight": [3.0, 0.4], "gradient": [None, None], "update": [None, None]}
    return write(folder, events)


def check(path: str) -> np.ndarray:
    data = Path(path).read_bytes()
    assert data.startswith(PNG) and len(data) > 10_000
    pixels = imread(path)
    assert pixels.shape[1] == 1000 and pixels[..., :3].std() > 0.05
    return pixels


def axes_of(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.lines]


def test_every_plot_of_two_runs(tmp_path: Path) -> None:
    dense = write(tmp_path / "dense", [start("none"), *steps(40), {"event": "result", "compression": 1.0}])
    files = report([whole_run(tmp_path / "thin"), dense], tmp_path / "deep" / "out")["files"]
    assert [Path(file).name for file in files] == ["loss-tokens.png", "loss-seconds.png", "ranks-thin.png", "moves-thin.png"]
    assert sorted(Path(file).name for file in files) == sorted(path.name for path in (tmp_path / "deep" / "out").iterdir())
    pixels = [check(file) for file in files]
    assert not np.array_equal(pixels[0], pixels[1])
    assert report([dense], tmp_path / "deep" / "out")["files"] == files[:2]  # written over


def test_numbers_of_the_loss_plot(tmp_path: Path) -> None:
    (run,) = read_runs([whole_run(tmp_path / "thin")])
    assert run.label == "thin · subspace 8×"
    assert math.isnan(run.loss[4]) and run.seconds[-1] == pytest.approx(90)
    for against, end in (("tokens", 60 * 4096), ("seconds", 90)):
        (axes,) = axes_of(loss_figure([run], against))  # type: ignore[arg-type]
        training, validation = axes.lines
        assert len(training.get_xdata()) == 59 and np.asarray(training.get_xdata())[-1] == pytest.approx(end)
        assert list(validation.get_ydata()) == [5.5, 4.6]
        assert list(validation.get_xdata()) == pytest.approx([end / 2, end])
        assert axes.get_ylabel() == "loss (nats per token)" and against[:4] in axes.get_xlabel().replace("time (s)", "seconds")
        inside = np.asarray(training.get_ydata())[10:]
        assert axes.get_ylim()[0] < min(inside) and max(inside) < axes.get_ylim()[1]


def test_numbers_of_the_rank_plot(tmp_path: Path) -> None:
    (run,) = read_runs([whole_run(tmp_path / "thin")])
    panels = axes_of(dict(figures([run]))["ranks-thin"])
    assert len(panels) == 12
    first = panels[0].lines[0]
    assert list(first.get_xdata()) == list(range(1, 60, 5))
    assert list(first.get_ydata())[:2] == [3.0, 7.0] and math.isnan(np.asarray(panels[2].lines[0].get_ydata())[0])
    for panel in panels[:6]:
        assert len(panel.lines) == 7  # six layers and k
        highest = np.nanmax([np.nanmax(np.asarray(line.get_ydata(), dtype=float)) for line in panel.lines])
        assert panel.get_ylim()[0] == 1 and panel.get_ylim()[1] >= highest
    assert [panel.get_ylabel() for panel in panels[::2]] == ["weight", "gradient", "update"] * 2


@pytest.mark.parametrize(("layers", "looks"), [(1, 1), (32, 3)])
def test_other_sizes(tmp_path: Path, layers: int, looks: int) -> None:
    events = [start(), *steps(1), *(ranks(s, layers) for s in range(1, looks + 1)), move(1, k=200)]
    for file in report([write(tmp_path / "run", events)], tmp_path / "out")["files"]:
        check(file)


def test_labels(tmp_path: Path) -> None:
    """Names no longer than they must be; compression from the result, else from the bytes, else the rank."""
    width, tokens = Config().sizes()["width"], 4096  # those of a step in `steps`
    sent = {"wire_forward": width // 4 * tokens * 3, "wire_backward": width // 4 * tokens * 3}  # d / 8 numbers of two bytes
    measured = write(tmp_path / "a" / "run", [start(stages=4), *steps(3, **sent)])
    unknown = write(tmp_path / "b" / "run", [start(), *steps(3)])
    bare = write(tmp_path / "c" / "run", steps(3, **sent))
    foreign = start(stages=4)
    foreign["config"]["model"] = {"brain": 7}
    other = write(tmp_path / "d" / "run", [foreign, *steps(3, **sent)])
    runs = read_runs([measured, unknown, measured / ".." / "run", bare, other])
    assert [run.label for run in runs] == ["a/run · subspace 8×", "b/run · subspace rank 16", "c/run", "d/run · subspace rank 16"]
    long = write(tmp_path / ("x" * 200), [start(), *steps(3), ranks(1, 2)])
    assert len(read_runs([long])[0].label) < 60
    assert [name for name, _ in figures(read_runs([unknown, long]))][-1].startswith("ranks-xx")


def test_more_runs_than_colours(tmp_path: Path) -> None:
    folders = [write(tmp_path / f"run-{i}", [start(), *steps(5 + i)]) for i in range(9)]
    figure = loss_figure(read_runs(folders), "tokens")
    styles = {(line.get_color(), line.get_linestyle()) for line in axes_of(figure)[0].lines if line.get_linestyle() != "None"}
    assert len(styles) == 9


def test_what_is_no_run(tmp_path: Path) -> None:
    good = whole_run(tmp_path / "good")
    cases = {
        "missing": tmp_path / "missing",
        "a file": tmp_path / "file",
        "no metrics": tmp_path / "bare",
        "empty": write(tmp_path / "empty", []),
        "no step": write(tmp_path / "begun", [start()]),
        "no loss": write(tmp_path / "poisoned", [start(), *steps(2, loss=None)]),
    }
    cases["a file"].write_text("")
    cases["no metrics"].mkdir()
    (cases["empty"] / "metrics.jsonl").write_text("no JSON\n[1]\n")
    for name, folder in cases.items():
        with pytest.raises(ThinpipeError, match=str(folder)) as told:
            report([good, folder], tmp_path / "out")
        assert len(str(told.value).splitlines()) == 1, name
    assert not (tmp_path / "out").exists()
    with pytest.raises(ThinpipeError, match="no run"):
        report([], tmp_path / "out")
    with pytest.raises(ThinpipeError, match="file can't be written"):
        report([good], tmp_path / "file")
