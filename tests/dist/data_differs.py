"""Run by 2 processes whose corpora differ: training must not begin, and with data.source = "first" it must."""

import json
import sys
from pathlib import Path

from conftest import tiny

from thinpipe.config import ThinpipeError, from_dict
from thinpipe.topology import connect
from thinpipe.trainer import Trainer

base, corpus = Path(sys.argv[1]), json.loads(sys.argv[2])
with connect(30) as here:
    for source in ("local", "first"):
        files = [*corpus["files"], str(base / "more.txt")] if here.is_first else corpus["files"]
        data = corpus | {"files": files, "source": source}
        folder = base / source
        folder.mkdir(exist_ok=True)
        config = from_dict(tiny(data=data, run={"dir": str(folder)}, pipeline={"stages": 2}, train={"steps": 3})).check()
        try:
            result = Trainer(config, here, folder).fit()
            text = f"trained {result.steps} steps" if result else ""
        except ThinpipeError as error:
            text = str(error)
        if here.is_first:
            print(f"RESULT {source}: {text}", flush=True)
