"""Run by 2 processes whose corpora differ: training must not begin, and with data.source = "first" it must, however long that takes."""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from conftest import tiny

from thinpipe import trainer
from thinpipe.config import Config, ThinpipeError, from_dict
from thinpipe.topology import connect
from thinpipe.trainer import Trainer

base, corpus = Path(sys.argv[1]), json.loads(sys.argv[2])
original = trainer.prepare


def slow_prepare(config: Config) -> Any:
    """Longer than a peer may be silent."""
    time.sleep(5)
    return original(config)


with connect(30) as here:
    for source in ("local", "first"):
        files = [*corpus["files"], str(base / "more.txt")] if here.is_first else corpus["files"]
        data = corpus | {"files": files, "source": source}
        folder = base / source
        folder.mkdir(exist_ok=True)
        config = from_dict(tiny(data=data, run={"dir": str(folder)}, pipeline={"stages": 2}, train={"steps": 3})).check()
        if source == "first":
            trainer.prepare = slow_prepare
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), here.group)
        try:
            result = Trainer(config, here, folder).fit()
            text = f"trained {result.steps} steps" if result else ""
        except ThinpipeError as error:
            text = str(error)
        if here.is_first:
            print(f"RESULT {source}: {text}", flush=True)
