"""Run by 8 processes: one run that changes its number of stages on the way, against one that does not; decoding over stages."""

import hashlib
import json
import sys
from pathlib import Path

import torch
from conftest import tiny

from thinpipe.config import Config, from_dict
from thinpipe.inference import load_run
from thinpipe.generate import generate
from thinpipe.metrics import read_events
from thinpipe.run import open_run
from thinpipe.topology import Topology, connect
from thinpipe.trainer import Trainer

torch.set_num_threads(1)
base, corpus = Path(sys.argv[1]), json.loads(sys.argv[2])


def config(folder: Path, stages: int, stop_at: int | None) -> Config:
    train = {"steps": 8, "eval_every": 4, "checkpoint_every": 0} | ({"stop_at": stop_at} if stop_at else {})
    layout = {"compression": {"move_every": 2}, "model": {"tied": True}}
    return from_dict(tiny(data=corpus, run={"dir": str(folder)}, train=train, pipeline={"stages": stages}, **layout))


seen: dict[int, str] = {}
original = Trainer.batch


def batch(self: Trainer, step: int) -> torch.Tensor | None:
    tokens = original(self, step)
    assert tokens is not None
    seen[step] = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    return tokens


Trainer.batch = batch  # type: ignore[method-assign]


def train(here: Topology | None, folder: Path, stop_at: int | None = None) -> None:
    if here is not None:
        wanted = config(folder, here.stages, stop_at)
        opened = open_run(wanted)[0] if here.is_first else None
        here.gather(0)
        opened = opened or open_run(wanted)[0]
        Trainer(opened, here, folder).fit()


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(folder / "metrics.jsonl") if event["event"] == "step"]


with connect(60) as world:
    of = {stages: world.first(stages) for stages in (1, 2, 4, 8)}
    report: dict[str, object] = {}
    for name, stages in (("one", 1), ("two", 2), ("four", 4)):
        seen.clear()
        train(of[stages], base / name)
        report[name] = {"losses": losses(base / name), "ids": list(seen.values())} if world.is_first else None
        world.gather(0)
    seen.clear()
    for stages, stop_at in ((4, 3), (2, 5), (8, None)):
        train(of[stages], base / "changing", stop_at)
        world.gather(0)
    if world.is_first:
        report["changing"] = {"losses": losses(base / "changing"), "ids": [seen[step] for step in sorted(seen)]}
        moves = {name: [e for e in read_events(base / name / "metrics.jsonl") if e["event"] == "move"] for name in ("one", "two", "four", "changing")}
        report["moves"] = moves
    texts = {}
    for stages in (1, 2, 4, 8):
        here = of[stages]
        if here is not None:
            run = load_run(base / "four", here)
            prompt = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
            rounds = generate(run.stage, here, prompt, 10, temperature=0.0)
            texts[stages] = torch.stack(list(rounds)).tolist()
            drawn = generate(run.stage, here, prompt, 10, temperature=1.0, top_p=0.9, seed=3)
            texts[stages] += torch.stack(list(drawn)).tolist()
    report["texts"] = world.gather(texts)
    if world.is_first:
        print("RESULT " + json.dumps(report), flush=True)
