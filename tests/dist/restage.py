"""8 processes: one run that changes its number of stages on the way, against ones that do not; decoding over stages.

They are forks of this one, so that what takes seconds to import is imported once.
"""

import hashlib
import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's optimizers do so when they are made
from conftest import tiny
from fewer import first

from thinpipe.config import Config, from_dict
from thinpipe.generate import generate
from thinpipe.inference import load_run
from thinpipe.metrics import read_events
from thinpipe.run import open_run
from thinpipe.topology import Topology, connect
from thinpipe.trainer import Trainer

WORLD = 8
CASES: dict[str, dict[str, Any]] = {
    "tied": {"compression": {"move_every": 2}, "model": {"tied": True}},
    "dense": {"compression": {"method": "none"}, "model": {"tied": False}},
}
FIXED = {"tied": {"one": 1, "two": 2, "four": 4}, "dense": {"four": 4}}  # runs that keep their number of stages
torch.set_num_threads(1)
base, corpus = Path(sys.argv[1]), json.loads(sys.argv[2])


def config(case: str, folder: Path, stages: int, stop_at: int | None) -> Config:
    train = {"steps": 8, "eval_every": 4, "checkpoint_every": 0} | ({"stop_at": stop_at} if stop_at else {})
    return from_dict(tiny(data=corpus, run={"dir": str(folder)}, train=train, pipeline={"stages": stages}, **CASES[case]))


seen: dict[int, str] = {}
original = Trainer.batch


def batch(self: Trainer, step: int) -> torch.Tensor | None:
    tokens = original(self, step)
    assert tokens is not None
    seen[step] = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    return tokens


Trainer.batch = batch  # type: ignore[method-assign]


def train(here: Topology | None, case: str, folder: Path, stop_at: int | None = None) -> None:
    if here is not None:
        wanted = config(case, folder, here.stages, stop_at)
        opened = open_run(wanted)[0] if here.is_first else None
        here.gather(0)
        opened = opened or open_run(wanted)[0]
        Trainer(opened, here, folder).fit()


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "metrics.jsonl") if event["event"] == kind]


def told(folder: Path) -> dict[str, Any]:
    losses = [event["loss"] for event in events(folder, "step")]
    return {"losses": losses, "ids": [seen[step] for step in sorted(seen)], "moves": events(folder, "move")}


def runs(case: str, world: Topology, of: dict[int, Topology | None]) -> dict[str, Any]:
    """What the first process knows of each run of a case."""
    report = {}
    for name, stages in FIXED[case].items():
        seen.clear()
        train(of[stages], case, base / case / name)
        report[name] = told(base / case / name)
        world.gather(0)
    seen.clear()
    for stages, stop_at in ((4, 3), (2, 5), (8, None)):
        train(of[stages], case, base / case / "changing", stop_at)
        world.gather(0)
    report["changing"] = told(base / case / "changing")
    return report


def texts(of: dict[int, Topology | None]) -> dict[int, list[list[int]]]:
    """What pipelines of each size write, by the number of stages, on the processes that are in them."""
    written = {}
    for stages, here in of.items():
        if here is not None:
            run = load_run(base / "tied" / "four", here)
            prompt = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
            likeliest = list(generate(run.stage, here, prompt, 10, temperature=0.0))
            # Ended early; what was posted for the next token must not meet the text after it.
            end = int(likeliest[2][0])
            ended = [int(ids) for ids in generate(run.stage, here, prompt[:1], 10, end_of_text=end)]
            assert ended == [int(ids[0]) for ids in likeliest][: len(ended)] and ended.index(end) == len(ended) - 1
            drawn = generate(run.stage, here, prompt, 10, temperature=1.0, top_p=0.9, seed=3)
            written[stages] = torch.stack([*likeliest, *drawn]).tolist()
    return written


def process(rank: int, port: int) -> None:
    place = {
        "RANK": rank,
        "WORLD_SIZE": WORLD,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": WORLD,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {key: str(value) for key, value in place.items()}
    with connect(60) as world:
        of = {stages: first(world, stages) for stages in (1, 2, 4, 8)}
        report: dict[str, Any] = {"runs": {case: runs(case, world, of) for case in CASES}, "texts": world.gather(texts(of))}
        if world.is_first:
            (base / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=process, args=(rank, free)) for rank in range(WORLD)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    sys.exit(any(each.exitcode for each in processes))
