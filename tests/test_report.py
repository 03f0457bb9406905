"""Plots and pages of made-up runs: pictures and a page that are whole, nothing without events for it, one line for what is no run."""

import base64
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from thinpipe import page as pages
from thinpipe.cli import main
from thinpipe.config import Config, ThinpipeError, to_dict
from thinpipe.page import report
from thinpipe.planner import message_bytes
from thinpipe.report import figures, loss_figure, read_runs
from thinpipe.run import TOKENIZER

PNG = b"\x89PNG\r\n\x1a\n"
WIDTH, TOKENS = Config().sizes()["width"], Config().train.batch * Config().sizes()["context"]  # of a step in `steps`


def write(folder: Path, events: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def start(method: str = "subspace", stages: int = 1) -> dict[str, Any]:
    config = to_dict(Config())
    config["compression"] |= {"method": method, "rank": 12, "segments": 4}
    config["pipeline"]["stages"] = stages
    return {"event": "start", "step": 0, "config": config, "stages": stages}


def steps(count: int, first: int = 1, **more: Any) -> list[dict[str, Any]]:
    noise = np.random.default_rng(0).normal(size=count)
    return [
        {"event": "step", "step": s, "loss": 3 + 6 / (1 + s / 20) + 0.05 * noise[s - 1], "tokens": TOKENS * s, "seconds": 1.5} | more
        for s in range(first, count + 1)
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
    """One stage and every kind of event; one step was refused, one rank has no figure, the last move has no energy after it yet."""
    events = [start(), *steps(60), {"event": "eval", "step": 30, "val_loss": 5.5}, {"event": "eval", "step": 60, "val_loss": 4.6}]
    events += [*(ranks(s, 6) for s in range(1, 60, 5)), move(20), move(40) | {"energy_after": None}]
    events += [{"event": "complaint", "text": "?"}, {"event": "result"}]
    events[5]["loss"] = None
    ranked = next(event for event in events if event["event"] == "ranks")
    ranked["matrices"]["layers.0.attn.o.weight"] = {"weight": [3.0, 0.4], "gradient": [None, None], "update": [None, None]}
    return write(folder, events)


def check(path: str) -> np.ndarray:
    data = Path(path).read_bytes()
    assert data.startswith(PNG) and len(data) > 5_000
    pixels = imread(path)
    assert pixels.shape[1] == 1000 and pixels[..., :3].std() > 0.05
    return pixels


def axes_of(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.lines]


class Page(HTMLParser):
    """What a page holds. Fails for tags that don't close in turn, for scripts, and for what would be fetched or run."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[bytes] = []
        self.cells: list[list[str]] = []
        self.text = ""
        self.feed(Path(path).read_text(encoding="utf-8"))
        self.close()
        assert not self.open and len(set(self.ids)) == len(self.ids) and set(self.links) <= set(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "form")
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("style", "srcset", "background", "http-equiv")
            if name == "src":
                kind, _, data = str(value).partition(",")
                assert kind == "data:image/png;base64"
                self.images.append(base64.b64decode(data, validate=True))
            if name == "href":
                assert str(value).startswith("#")
                self.links.append(str(value)[1:])
            if name == "id":
                self.ids.append(str(value))
        if tag == "tr":
            self.cells.append([])
        if tag in ("th", "td"):
            self.cells[-1].append("")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            assert "url" not in data and "@import" not in data
        elif {"th", "td"} & set(self.open):
            self.cells[-1][-1] += data
        self.text += data

    def row(self, name: str) -> list[str]:
        (found,) = [cells[1:] for cells in self.cells if cells[0] == name]
        return found


def test_every_plot_of_two_runs(tmp_path: Path) -> None:
    """All that there are events for, as files and in the page; nothing else is left in the folder."""
    dense, out = write(tmp_path / "dense", [start("none"), *steps(40)]), tmp_path / "deep" / "out"
    files = report([whole_run(tmp_path / "thin"), dense], out)["files"]
    names = ["loss-tokens.png", "loss-seconds.png", "loss-bytes.png", "ranks-thin.png", "moves-thin.png", "report.html"]
    assert [Path(file).name for file in files] == names
    assert sorted(names) == sorted(path.name for path in out.iterdir())
    pixels = [check(file) for file in files[:-1]]
    assert not np.array_equal(pixels[0], pixels[1]) and not np.array_equal(pixels[0], pixels[2])
    assert Page(files[-1]).images == [Path(file).read_bytes() for file in files[:-1]]
    assert report([dense], out)["files"] == [*files[:3], files[-1]]  # written over
    assert len(Page(files[-1]).images) == 3


def test_numbers_of_the_page(tmp_path: Path) -> None:
    """Headline and sections of an unfinished dense run of four stages in its second life, and of a finished one of one stage."""
    sent = {"wire_forward": 2 * WIDTH * TOKENS * 3, "wire_backward": 2 * WIDTH * TOKENS * 3}
    again = start("none", stages=4) | {"step": 20}
    events = [start("none", stages=4), *steps(20, **sent), again, *steps(30, first=21, **sent)]
    dense, thin = write(tmp_path / "dense", events), tmp_path / "thin"
    events = [start(), *steps(60), {"event": "eval", "step": 30, "val_loss": 5.5}, {"event": "eval", "step": 60, "val_loss": 4.6}]
    for event in events[5:61]:
        event["refused"] = 1
    events.append({"event": "complaint", "step": 50, "text": "no room"})
    events.append({"event": "result", "step": 60, "parameters": 1234567, "seconds_per_step": 2.0, "tied_bytes_per_step": 4000})
    write(thin, events)
    with open(thin / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "step": 61, "lo')  # cut short
    page = Page(report([dense, thin], tmp_path / "out")["files"][-1])
    assert page.cells[0] == ["", "dense", "thin"] and page.links == ["run-0", "run-1"]
    assert page.row("method") == ["none", "subspace"] and page.row("stages") == ["4", "1"]
    assert page.row("steps") == ["30", "60"] and page.row("tokens") == ["61,440", "122,880"]
    assert page.row("parameters") == ["–", "1,234,567"]
    assert page.row("validation loss") == ["–", "4.6000"] and page.row("perplexity") == ["–", f"{math.exp(4.6):.2f}"]
    assert page.row("seconds per step") == ["1.5", "2"] and page.row("tokens per second") == ["1,365", "1,024"]
    assert page.row("wire bytes per token") == ["192", "24"] and page.row("the same, dense bfloat16") == ["192", "192"]
    assert page.row("compression") == ["1×", "8×"]
    assert page.row("refused steps") == ["0", "1"] and page.row("restarts") == ["1", "0"]
    assert page.row("none") == ["393,216"] * 2 and page.row("subspace") == ["49,152"] * 2  # bytes of a step over one boundary
    assert "each of 3 boundaries" in page.text and "over a cut, if it were sent" in page.text and "4,000 bytes for the tied" in page.text
    assert "step 5" in page.text and "step 50: no room" in page.text
    assert ["pipeline.stages", "1", "4"] in page.cells and ["compression.method", '"none"', '"subspace"'] in page.cells


def test_what_a_run_has_no_events_for_is_left_out(tmp_path: Path) -> None:
    """No validation, no bytes, no config: neither rows nor headings nor plots, and NaN is no number."""
    events = [*steps(5), {"event": "eval", "step": 5, "val_loss": math.nan}]
    events[2]["loss"] = math.nan
    files = report([write(tmp_path / "run", events)], tmp_path / "out")["files"]
    page = Page(files[-1])
    assert [Path(file).name for file in files] == ["loss-tokens.png", "loss-seconds.png", "report.html"]
    measures = [cells[0] for cells in page.cells[1:]]
    assert measures == [
        "steps",
        "tokens",
        "seconds per step",
        "tokens per second",
        "refused steps",
        "restarts",
    ]
    assert not any(word in page.text for word in ("nan", "None", "Complaints", "Config", "writes", "Planned"))


def test_bytes_of_a_run_that_changed_its_stages(tmp_path: Path) -> None:
    """Counted per boundary of each life; by formula where one stage holds all."""
    config = Config()
    formula = sum(message_bytes(config)) * config.pipeline.micro_batches
    events = [start(stages=4), *steps(10, wire_forward=300, wire_backward=600), start(stages=2)]
    events += [*steps(20, first=11, wire_forward=100, wire_backward=200), start(stages=1), *steps(30, first=21)]
    (run,) = read_runs([write(tmp_path / "run", events)])
    assert run.bytes[[0, 9, 19]].tolist() == [300, 3000, 6000] and run.bytes[29] == 6000 + 10 * formula
    assert run.restarts == 2 and run.stages == 1


def test_the_timeline_is_planned_over_the_known_links(tmp_path: Path) -> None:
    """plan.link, or what the lab measured; the schedule that "auto" took; no timeline where nothing can be planned."""
    begun = start(stages=4)
    begun["config"]["pipeline"]["schedule"] = "auto"
    taken = {"event": "schedule", "schedule": "gpipe", "warmup": None}
    folder = write(tmp_path / "run", [begun, taken, *steps(3)])
    files = report([folder], tmp_path / "out")["files"]
    assert [Path(file).name for file in files[-2:]] == ["timeline-run.png", "report.html"]
    text = Page(files[-1]).text
    assert "not measured: schedule gpipe over 80mbit,25ms (plan.link), compute of L4 by formula" in text
    assert "With compute as measured" not in text
    fixed = write(tmp_path / "fixed", [begun, taken | {"warmup": 9}, *steps(3), start(stages=4), *steps(5, first=4)])
    assert "not measured: schedule wan over" in Page(report([fixed], tmp_path / "out")["files"][-1]).text  # that of the last life
    lab = {"link": "10mbit,50ms", "achieved_link": "9.6mbit,50.6ms/9.5mbit,50.6ms/9.6mbit,50.4ms", "seconds_per_step": 0.456}
    (folder / "lab.json").write_text(json.dumps(lab))
    text = Page(report([folder], tmp_path / "out")["files"][-1]).text
    assert f"gpipe over {lab['achieved_link']} (measured in the lab), compute of cpu by formula" in text
    assert "the lab planned – s; a step took 0.456 s" in text
    (folder / "lab.json").write_text(json.dumps(lab | {"achieved_link": "fast"}))
    assert [Path(file).name for file in report([folder], tmp_path / "other")["files"]] == [
        "loss-tokens.png",
        "loss-seconds.png",
        "report.html",
    ]


def test_the_planned_model_has_a_row_for_the_largest_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer's ids may have holes."""
    folder, planned = write(tmp_path / "run", [start(stages=4), *steps(3)]), []
    Tokenizer(WordLevel({"a": 0, "b": 999})).save(str(folder / TOKENIZER))
    original = pages.plan
    monkeypatch.setattr(pages, "plan", lambda config, vocab, *rest: planned.append(vocab) or original(config, vocab, *rest))
    report([folder], tmp_path / "out")
    assert planned == [1000]


def test_bytes_of_replicas_are_those_of_one(tmp_path: Path) -> None:
    """Two replicas share the batch; what is counted crosses the boundary of the first one."""
    begun = start("none", stages=2)
    begun["config"]["pipeline"]["replicas"] = 2
    share = 2 * WIDTH * TOKENS // 2
    events = [begun, *steps(9, wire_forward=share, wire_backward=share)]
    for event in events[5:]:  # one is lost
        event["tokens"] = (4 + event["step"]) * TOKENS // 2
    page = Page(report([write(tmp_path / "run", events)], tmp_path / "out")["files"][-1])
    assert page.row("wire bytes per token") == ["192"] and page.row("compression") == ["1×"]
    assert page.row("none") == page.row("dense, bfloat16") == [f"{share:,}"] * 2


def test_markup_stays_text(tmp_path: Path) -> None:
    """Of names, samples, complaints and configs, in the page and in the plots."""
    bad = """</pre><script src="http://x.example/">&amp;'"""
    events = [start(), *steps(3), move(2), {"event": "complaint", "step": 2, "text": bad}, {"event": "result", "sample": bad}]
    events[0]["config"]["train"]["sample"] = bad
    events[0]["config"]["run"] |= {"dir": "runs/secret", "prometheus": "10.77.0.1:9400"}
    events[0]["config"]["network"]["addr"] = "10.77.0.1"
    name = r"<b onclick='x'>$\pi$&amp;" + '"\udcff'
    page = Page(report([write(tmp_path / name, events)], tmp_path / "out")["files"][-1])
    shown = name.replace("\udcff", "?")
    assert page.cells[0] == ["", shown] and f"{shown} · subspace 8×" in page.text
    assert page.text.count(bad) == 2  # the config's as JSON, where its quotation marks are escaped
    assert not {"run.dir", "run.prometheus", "network.addr"} & {cells[0] for cells in page.cells}  # a page is passed on
    assert ["train.sample", json.dumps(bad), '"def "'] in page.cells


def test_numbers_of_the_loss_plot(tmp_path: Path) -> None:
    (run,) = read_runs([whole_run(tmp_path / "thin")])
    assert run.label == "thin · subspace 8×"
    assert math.isnan(run.loss[4]) and run.seconds[-1] == pytest.approx(90)
    for against, end in (("tokens", 60 * TOKENS), ("seconds", 90), ("bytes", 60 * TOKENS * 24 * 2)):
        (axes,) = axes_of(loss_figure([run], against))  # type: ignore[arg-type]
        training, validation = axes.lines
        assert len(training.get_xdata()) == 59 and np.asarray(training.get_xdata())[-1] == pytest.approx(end)
        assert list(validation.get_ydata()) == [5.5, 4.6]
        assert list(validation.get_xdata()) == pytest.approx([end / 2, end])
        assert axes.get_ylabel() == "loss (nats per token)" and against in axes.get_xlabel().replace("time (s)", "seconds")
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
    *pictures, page = report([write(tmp_path / "run", events)], tmp_path / "out")["files"]
    for file in pictures:
        check(file)
    assert len(Page(page).images) == len(pictures) and Path(page).stat().st_size < 500_000  # four such runs stay below 2 MB


def test_labels(tmp_path: Path) -> None:
    """Names no longer than they must be; compression from the bytes, counted or by formula, else the rank."""
    sent = {"wire_forward": WIDTH // 2 * TOKENS * 3, "wire_backward": WIDTH // 2 * TOKENS * 3}  # d / 4 numbers of two bytes
    measured = write(tmp_path / "a" / "run", [start(stages=4), *steps(3, **sent)])
    formula = write(tmp_path / "b" / "run", [start(), *steps(3)])
    bare = write(tmp_path / "c" / "run", steps(3, **sent))
    foreign = start(stages=4)
    foreign["config"]["model"] = {"brain": 7}
    other = write(tmp_path / "d" / "run", [foreign, *steps(3, **sent)])
    runs = read_runs([measured, formula, measured / ".." / "run", bare, other])
    assert [run.label for run in runs] == ["a/run · subspace 4×", "b/run · subspace 8×", "c/run", "d/run · subspace rank 12"]
    long = write(tmp_path / ("x" * 200), [start(), *steps(3), ranks(1, 2)])
    assert len(read_runs([long])[0].label) < 60
    assert [name for name, _ in figures(read_runs([formula, long]))][-1].startswith("ranks-xx")


def test_more_runs_than_colours(tmp_path: Path) -> None:
    """As many as there may well be differ, on the plot and above it."""
    folders = [write(tmp_path / f"projected-tables-local-loss-{i:02}", [start("projected"), *steps(5 + i)]) for i in range(20)]
    figure = loss_figure(read_runs(folders), "tokens")
    styles = [(line.get_color(), line.get_linestyle()) for line in axes_of(figure)[0].lines if line.get_linestyle() != "None"]
    assert len(styles) == len(set(styles)) == 20
    figure.canvas.draw()
    handles, texts = figure.legends[0].get_lines(), figure.legends[0].get_texts()
    assert [(line.get_color(), line.get_linestyle()) for line in handles] == styles
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in texts)


def test_a_run_that_diverges_leaves_the_others_readable(tmp_path: Path) -> None:
    away = [step | {"loss": 8 + step["step"] ** 2} for step in steps(60)]
    folders = [write(tmp_path / "away", [start(), *away, {"event": "eval", "step": 60, "val_loss": 3600.0}]), whole_run(tmp_path / "thin")]
    (axes,) = axes_of(loss_figure(read_runs(folders), "tokens"))
    assert axes.get_ylim()[0] < 4.6 and axes.get_ylim()[1] < 12
    assert [list(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "None"] == [[], [5.5, 4.6]]
    (axes,) = axes_of(loss_figure(read_runs(folders[:1]), "tokens"))
    assert axes.get_ylim()[1] > 3600  # alone it is shown


def test_a_run_of_one_step_shows(tmp_path: Path) -> None:
    (axes,) = axes_of(loss_figure(read_runs([write(tmp_path / "one", [start(), *steps(1)])]), "tokens"))
    assert axes.lines[0].get_marker() == "."


def test_what_is_no_run(tmp_path: Path) -> None:
    good = whole_run(tmp_path / "good")
    cases = {
        "missing": tmp_path / "missing",
        "a file": tmp_path / "file",
        "no metrics": tmp_path / "bare",
        "empty": write(tmp_path / "empty", []),
        "no step": write(tmp_path / "begun", [start()]),
        "no loss": write(tmp_path / "poisoned", [start(), *steps(2, loss=None)]),
        "damaged": write(tmp_path / "damaged", [start(), *steps(2, loss="high")]),
        "no config": write(tmp_path / "odd", [start() | {"config": [1]}, *steps(2)]),
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
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ThinpipeError, match=f"{out} can't be written"):
            report([good], out)
    (tmp_path / "taken" / "report.html").mkdir(parents=True)
    with pytest.raises(ThinpipeError, match="taken can't be written"):
        report([write(tmp_path / "small", [start(), *steps(3)])], tmp_path / "taken")
    assert not [path for path in (tmp_path / "taken").iterdir() if path.name.startswith(".")]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write(tmp_path / "run", [start(), *steps(3)]), tmp_path / "out"
    with pytest.raises(SystemExit, match="0"):
        main(["report", str(run), "--out", str(out), "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["files"][-1] == str(out / "report.html")
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(tmp_path / "no"), "--out", str(out)])
    told = capsys.readouterr().err
    assert told.startswith("thinpipe: ") and "holds no metrics.jsonl" in told and len(told.splitlines()) == 1
