"""The race's arithmetic on made-up curves, and what may not differ between its configs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import tiny

from thinpipe.cli import _print_race
from thinpipe.config import Config, ThinpipeError, dump, from_dict
from thinpipe.metrics import to_json
from thinpipe.planner import Costs, average_bytes
from thinpipe.race import Curve, Entry, _bytes_per_step, _check, _extended, _learn, _rows, _time_step, figures, race, steps_to


def entry(name: str, **groups: dict[str, Any]) -> Entry:
    return Entry(name=name, config=from_dict(tiny(**({"pipeline": {"stages": 2}} | groups))), link="80mbit,25ms")


def curve(name: str, losses: list[list[float]], seconds: float, **groups: dict[str, Any]) -> Curve:
    return Curve(
        entry=entry(name, **groups),
        steps=np.array([10, 20, 30]),
        losses=np.array(losses),
        seconds_per_step=seconds,
        timed="planner",
        bytes_per_step=1e4,
        compression=8.0,
    )


def test_the_first_reaches_its_own_final_loss_with_several_seeds() -> None:
    dense = curve("dense", [[3.0, 2.0, 1.0], [3.0, 2.0, 1.2], [3.0, 2.0, 1.5]], seconds=1.0)
    (row,) = _rows([dense], target=float(dense.losses.mean(0)[-1]))
    assert row["steps_to_target"] == 30 and row["speedup_vs_first"] == 1


@pytest.mark.parametrize(("target", "step"), [(3.0, 10.0), (5.0, 10.0), (2.5, 15.0), (2.0, 20.0), (1.6, 28.0), (1.5, 30.0), (1.4, None)])
def test_steps_to_a_target_are_on_the_line_between_validations(target: float, step: float | None) -> None:
    found = steps_to(target, np.array([10, 20, 30]), np.array([3.0, 2.0, 1.5]))
    assert found == (None if step is None else pytest.approx(step))


def test_a_slower_learner_may_win_by_time() -> None:
    dense = curve("dense", [[3.0, 2.0, 1.0], [3.0, 2.0, 1.2]], seconds=10.0)
    thin = curve("thin", [[3.0, 2.2, 1.05], [3.0, 2.2, 1.05]], seconds=1.0)
    lost = curve("lost", [[3.0, 2.0, 1.0], [3.0, 2.5, 2.2]], seconds=1.0)
    rows = _rows([dense, thin, lost], target=1.5)
    assert rows[0]["steps_to_target"] == pytest.approx(20 + 10 * 0.5 / 0.9) and rows[0]["speedup_vs_first"] == 1
    assert rows[1]["gap_vs_first"] == pytest.approx(1.05 / 1.1 - 1) and rows[1]["final_val_loss_spread"] == 0
    assert rows[1]["speedup_vs_first"] == pytest.approx(10 * (20 + 10 * 0.5 / 0.9) / (20 + 10 * 0.7 / 1.15))
    # The seeds' mean counts: one of them that is there is not enough.
    assert rows[2]["steps_to_target"] is None and rows[2]["time_to_target"] is None and rows[2]["speedup_vs_first"] is None
    assert [name for name, _ in figures([dense, thin, lost], 1.5)] == ["loss-tokens", "loss-seconds", "loss-bytes"]


def test_the_first_row_reaches_its_own_final_loss_with_any_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"dense": [[3.0, 2.0, 1.0], [3.0, 2.0, 1.2], [3.0, 2.0, 1.3]], "thin": [[3.0, 2.2, 1.7]] * 3, "thin x2": [[3.0, 2.0, 1.0]] * 3}
    monkeypatch.setattr("thinpipe.race._learn", lambda entry, *more: (np.array([10, 20, 30]), np.array(losses[entry.name])))
    monkeypatch.setattr("thinpipe.race._time_steps", lambda *more: [2.0, 1.0])
    monkeypatch.setattr("thinpipe.race.prepare", lambda config: SimpleNamespace(vocab=300))
    result = race([entry("dense"), entry("thin")], tmp_path, seeds=3, extend=2, timing="planner", say=print)
    assert [(row["name"], row["steps_to_target"]) for row in result["rows"]] == [
        ("dense", 30),
        ("thin", None),
        ("thin x2", pytest.approx(20 + 10 * (2 - 3.5 / 3))),
    ]
    assert result["rows"][2]["speedup_vs_first"] == pytest.approx(60 / (20 + 10 * (2 - 3.5 / 3)))


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({"data": {"vocab": 400}}, "data differs between a and b"),
        ({"train": {"batch": 8}}, "train.batch differs"),
        ({"train": {"steps": 7}}, "train.steps differs"),
        ({"train": {"stop_at": 3}}, "train.stop_at differs"),
        ({"train": {"eval_batches": 1}}, "train.eval_batches differs"),
        ({"model": {"context": 8}}, "model.context differs"),
        ({"run": {"seed": 1}}, "run.seed differs"),
        ({"train": {"eval_every": 0}}, "b: train.eval_every = 0"),
        ({"pipeline": {"stages": 1}}, "b: pipeline.stages = 1 has no link"),
    ],
)
def test_what_is_not_comparable_is_named(groups: dict[str, Any], says: str) -> None:
    with pytest.raises(ThinpipeError, match=says):
        _check([entry("a"), entry("b", **groups)])
    with pytest.raises(ThinpipeError, match=r"--link or plan\.link of b '80mbit' has no delay"):
        _check([entry("a"), replace(entry("b"), link="80mbit")])
    with pytest.raises(ThinpipeError, match="of b = '1mbit,1ms/2mbit,1ms/3mbit,1ms' has different links"):
        _check([entry("a"), replace(entry("b", pipeline={"stages": 2, "replicas": 2}), link="1mbit,1ms/2mbit,1ms/3mbit,1ms")])
    _check([entry("a"), entry("b", compression={"method": "none"}, pipeline={"stages": 4}, optim={"lr": 1e-3})])


def test_a_run_that_is_there_counts_if_it_was_validated_alike(tmp_path: Path, corpus: dict[str, Any]) -> None:
    # What the config says of other machines is for training, not for a race.
    given: dict[str, Any] = {"data": corpus, "network": {"rdzv": "127.0.0.1:29777", "nodes": 2}}
    train = {"eval_every": 3, "eval_batches": 2}
    steps, losses = _learn(entry("a", train=train, **given), tmp_path, 1, print, debug=False)
    assert list(steps) == [3, 6] and losses.shape == (1, 2)
    for name, was in train.items():
        with pytest.raises(ThinpipeError, match=rf"a-0 holds a run with train\.{name} = {was} and the race has 1 now; give another --out"):
            _learn(entry("a", train=train | {name: 1}, **given), tmp_path, 2, print, debug=False)


def test_who_stops_early_is_extended_in_proportion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def learn(entry: Entry, *more: Any) -> tuple[np.ndarray, np.ndarray]:
        seen.append(entry.config.train)
        return np.array([3]), np.ones((1, 1))

    monkeypatch.setattr("thinpipe.race._learn", learn)
    _extended(curve("a", [[3.0, 2.0, 1.0]], 1.0, train={"stop_at": 3}), 3, tmp_path, print, debug=False)
    assert (seen[0].steps, seen[0].last_step) == (18, 9)


def test_the_lab_times_whole_averages_however_early_a_run_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(config: Config, *more: Any) -> dict[str, float]:
        events = [{"event": "step", "step": s, "time": 2.0 * s} for s in range(1, config.train.last_step + 1)]
        (Path(config.run.dir or "") / "metrics.jsonl").write_text("".join(to_json(event) + "\n" for event in events))
        return {"seconds_per_step": 1.0}

    monkeypatch.setattr("thinpipe.race.train_in_lab", measure)
    raced = entry("a", pipeline={"stages": 1, "replicas": 2}, average={"every": 10}, train={"stop_at": 4}, compression={"move_every": 0})
    assert _time_step(raced, tmp_path, "lab", print, debug=False) == 2


def test_replicas_of_one_stage_average_over_the_link(tmp_path: Path, corpus: dict[str, Any]) -> None:
    told = {}
    for link in ("unlimited", "1mbit,25ms"):
        groups: dict[str, Any] = {"pipeline": {"stages": 1, "replicas": 2}, "data": corpus}
        told[link] = _time_step(replace(entry("a", **groups), link=link), tmp_path, "planner", print, debug=False)
    # The gradients of all parameters, each way: far more than a delay.
    assert told["1mbit,25ms"] > told["unlimited"] + 0.05


def test_bytes_of_a_tied_table_count_in_every_replica() -> None:
    def told(replicas: int, *, tied: bool) -> float:
        given = entry("a", model={"tied": tied}, pipeline={"stages": 2, "replicas": replicas}).config
        return _bytes_per_step(given, 300) - average_bytes(given, 300)

    boundary = 16 * 16 * 8 * 2 * 2  # tokens, coordinates, bytes, both ways
    assert [told(replicas, tied=False) for replicas in (1, 2)] == [boundary] * 2
    assert [told(replicas, tied=True) for replicas in (1, 2)] == [boundary + replicas * 2 * 300 * 8 * 4 for replicas in (1, 2)]


def test_planned_stages_have_machines_of_their_own(tmp_path: Path, corpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They were measured on the cores of one, all at once."""
    costs = Costs((0.1,) * 4, (0.2,) * 4, (0.0,) * 4, 10, 10, cores=1)
    monkeypatch.setattr(
        "thinpipe.calibrate.launch.start", lambda _, folder, *more: (folder / "costs.json").write_text(to_json(asdict(costs)))
    )
    raced = entry("a", pipeline={"stages": 4, "micro_batches": 4}, data=corpus)
    seconds = _time_step(replace(raced, link="unlimited"), tmp_path, "planner", print, debug=False)
    assert seconds == pytest.approx((4 + 3) * 0.3)  # four micro-batches, and three stages to get through; one core would need 4.8


def test_a_loss_that_is_no_number_leaves_the_other_curves() -> None:
    lost = curve("lost", [[3.0, math.nan, math.nan]], seconds=1.0)
    for figure in (*figures([curve("dense", [[3.0, 2.0, 1.0]], 1.0), lost], 1.5), *figures([lost], math.nan)):
        assert figure[1].axes


def test_a_row_that_diverges_leaves_the_others_readable() -> None:
    away = curve("away", [[80.0, 900.0, 4000.0]], seconds=1.0)
    for _, figure in figures([away, curve("dense", [[3.0, 2.0, 1.0]], 1.0)], 1.0):
        low, high = figure.axes[0].get_ylim()
        assert low < 1 and 3 < high < 7


def test_legends_show_every_name_as_it_is() -> None:
    names = ("_base", "a$b$", "projected-tables-local-loss-int4-rank-12-batch-64")
    for _, figure in figures([curve(name, [[3.0, 2.0, 1.0]], 1.0) for name in names], 1.0):
        figure.canvas.draw()
        texts = figure.legends[0].get_texts()
        assert [text.get_text().partition(" ")[0] for text in texts] == ["_base", r"a\$b\$", "…-loss-int4-rank-12-batch-64"]
        assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in texts)


def test_a_narrow_terminal_cuts_no_figure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    named = curve("projected-tables-local-loss x3", [[3.0, 2.0, 1.2345]], seconds=1234.5678)
    _print_race({"target_loss": 1.5, "timed_by": "planner", "rows": _rows([named], 1.5), "files": []})
    told = capsys.readouterr().out
    assert all(each in told for each in ("projected-", "1/8", "1.2345", "0.0000", "+0.0%", "1234.568", "32,", " s ", "1.00x")), told


def write(path: Path, config: Config) -> str:
    path.write_text(dump(config))
    return str(path)


@pytest.mark.slow
def test_the_command_trains_each_once_and_compares(tmp_path: Path, corpus: dict[str, Any]) -> None:
    for name, groups in {"dense": {"method": "none", "segments": 2}, "thin": {"rank": 4, "segments": 2}}.items():
        write(tmp_path / f"{name}.toml", from_dict(tiny(data=corpus, compression=groups, pipeline={"stages": 2})))
    command = [sys.executable, "-m", "thinpipe", "race", "dense.toml", "thin.toml", "--link", "1mbit,25ms", "thin.toml=unlimited"]
    command += ["--timing", "planner", "--out", "out", "--json"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=200, env=env)

    done = run()
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    dense, thin = result["rows"]
    assert result["target_loss"] == dense["final_val_loss"] and dense["steps_to_target"] == 6
    assert (dense["method"], thin["method"]) == ("none", "subspace") and thin["compression"] == 8
    assert dense["seconds_per_step"] > 16 * 16 * 32 * 2 * 8 / 1e6 and thin["seconds_per_step"] < dense["seconds_per_step"]
    assert all(Path(tmp_path / file).stat().st_size > 10_000 for file in result["files"]) and len(result["files"]) == 3
    # Who misses the target once gets twice the steps; what is there stays.
    longer = run("--extend", "2", "--target", "0.5")
    rows = json.loads(longer.stdout.splitlines()[-1])["rows"]
    assert [(row["name"], row["steps"]) for row in rows] == [("dense", 6), ("thin", 6), ("dense x2", 12), ("thin x2", 12)]
    assert rows[0]["final_val_loss"] == dense["final_val_loss"] and rows[0]["steps_to_target"] is None
    assert rows[2]["seconds_per_step"] == rows[0]["seconds_per_step"] and rows[2]["final_val_loss"] != dense["final_val_loss"]
    stamp = (tmp_path / "out/dense-0/result.json").stat().st_mtime_ns
    bad = run("--train.steps", "3")  # fewer than the runs in `out` have
    assert bad.returncode == 2 and "train.steps" in bad.stderr and "Traceback" not in bad.stderr
    assert (tmp_path / "out/dense-0/result.json").stat().st_mtime_ns == stamp
