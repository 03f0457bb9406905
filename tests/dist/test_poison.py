"""Numbers that are not finite: refused by all stages in the same step, traced to where they came from, and no run of them goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_command import finish, start, write

from thinpipe import faults
from thinpipe.faults import Fault
from thinpipe.metrics import read_events


def poisoned(folder: Path, corpus: dict[str, Any], planned: list[Fault], *more: str) -> tuple[int, str, str]:
    faults.write(folder / "faults.json", planned)
    config = write(folder, corpus, pipeline={"stages": 3}, train={"steps": 8, "checkpoint_every": 2})
    return finish(start(folder, "train", str(config), "--run.dir", "run", "--json", *more, THINPIPE_FAULTS=str(folder / "faults.json")))


def test_a_poisoned_step_is_refused_everywhere_and_its_origin_named(tmp_path: Path, corpus: dict[str, Any]) -> None:
    status, out, err = poisoned(tmp_path, corpus, [Fault(what="poison", stage=1, step=3), Fault(what="poison", stage=2, step=6)])
    assert status == 0, err
    assert json.loads(out.splitlines()[-1])["refused_steps"] == 2
    assert "step 3 is refused: stage 1 on" in err and "step 6 is refused: stage 2 on" in err and "made activations" in err, err
    lost = [e["step"] for e in read_events(tmp_path / "run/metrics.jsonl") if e["event"] == "step" and e["loss"] is None]
    assert lost == [3, 6]


@pytest.mark.slow
def test_a_replica_does_not_take_another_ones_numbers_for_its_own(tmp_path: Path, corpus: dict[str, Any]) -> None:
    status, _, err = poisoned(tmp_path, corpus, [Fault(what="poison", replica=1, stage=1, step=3)], "--pipeline.replicas", "2")
    assert status == 0, err
    runs = [tmp_path / "run", tmp_path / "run/replicas/1"]
    told = [[e["text"] for e in read_events(run / "metrics.jsonl") if e["event"] == "complaint"] for run in runs]
    assert len(told[0]) == 1 and told[0][0].startswith("step 3 is refused: the mean of the replicas' gradients is not finite"), told
    assert len(told[1]) == 1 and told[1][0].startswith("step 3 is refused: stage 1 on"), told


@pytest.mark.slow
def test_steps_refused_in_a_row_end_the_run_with_the_checkpoint_before(tmp_path: Path, corpus: dict[str, Any]) -> None:
    planned = [Fault(what="poison", stage=1, step=step) for step in (5, 6, 7)]
    status, _, err = poisoned(tmp_path, corpus, planned, "--train.max-refused", "3")
    assert status == 2 and "3 steps in a row were refused (train.max_refused)" in err and "the checkpoint of step 4 stands" in err, err
    assert "starting again" not in err and "Traceback" not in err
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*")) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "can't be read"),
        ('[{"what": "kill", "stage": 1}]', "is no fault"),
        ('[{"what": "bribe", "stage": 1, "step": 2}]', "what = 'bribe' can't be used"),
        ('[{"what": "kill", "stage": "one", "step": 2}]', "stage = 'one' can't be used"),
    ],
)
def test_a_plan_of_faults_that_is_none(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "faults.json").write_text(text)
    with pytest.raises(ValueError, match=named.replace("(", r"\(")):
        faults.read(tmp_path / "faults.json")


def test_drawn_faults_are_every_stages_share() -> None:
    drawn = faults.draw(3, 12, 4, range(10, 100))
    assert drawn == faults.draw(3, 12, 4, range(10, 100)) != faults.draw(4, 12, 4, range(10, 100))
    assert [sum(fault.stage == stage for fault in drawn) for stage in range(4)] == [3] * 4
    assert [fault.step for fault in drawn] == sorted(fault.step for fault in drawn)
