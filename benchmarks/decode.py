"""Latency of staged decoding, dense against subspace, over emulated links and an unlimited one (needs root for the lab).

Random weights: latency doesn't depend on what the model knows. For each link and batch: seconds for the prompt, milliseconds per new
token (median), bytes per token and boundary, and the floor that the links' delays alone set: S - 1 activations up one after the other,
then the picked id straight to the first stage.

    python benchmarks/decode.py [--links 80mbit,25ms unlimited] [--batches 1 16]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

STAGES, LAYERS, WIDTH, CONTEXT, RANK, PROMPT = 4, 8, 1024, 640, 10, 512  # k: about 100 times fewer numbers than d


def stage(method: str, batch: int, tokens: int) -> None:
    """One process: decode and, on the first stage, print the figures as JSON."""
    import torch

    from thinpipe.config import from_dict
    from thinpipe.generate import generate
    from thinpipe.model import build_stages
    from thinpipe.topology import connect

    torch.set_num_threads(1)
    config = from_dict(
        {
            "model": {"width": WIDTH, "layers": LAYERS, "heads": 16, "kv_heads": 4, "context": CONTEXT},
            "compression": {"method": method, "rank": RANK},
            "pipeline": {"stages": STAGES},
        }
    ).check()
    with connect(300) as here:
        (model,) = build_stages(config, 4096, [here.stage])
        prompt = torch.randint(4096, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
        for _ in generate(model, here, prompt[:, :8], 3):
            pass  # connections and allocations
        here.gather(0)
        times = [time.perf_counter()]
        for _ in generate(model, here, prompt, tokens):
            times.append(time.perf_counter())
        if here.is_first:
            steps = [b - a for a, b in pairwise(times[1:])]
            sent = model.codec.wire_bytes
            print(json.dumps({"prompt_s": times[1] - times[0], "token_ms": 1e3 * median(steps), "bytes": sent}), flush=True)


def run(hosts: Any, method: str, batch: int, tokens: int) -> dict[str, Any]:
    """The four processes, each in its host of the lab (None: on this machine's loopback)."""
    address = hosts[0].address if hosts else "127.0.0.1"
    processes = []
    for rank in range(STAGES):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(STAGES), "MASTER_ADDR": address, "MASTER_PORT": "29511"}
        env |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(STAGES), "OMP_NUM_THREADS": "1"}
        prefix = list(hosts[rank].command_prefix) if hosts else []
        command = [*prefix, sys.executable, str(Path(__file__)), "--stage", method, str(batch), str(tokens)]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "a stage failed"
    result: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=["80mbit,25ms", "unlimited"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--stage", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        return stage(arguments.stage[0], int(arguments.stage[1]), int(arguments.stage[2]))
    from thinpipe.lab import lab, parse_links

    print(f"{LAYERS} layers of d = {WIDTH} on {STAGES} stages, prompt of {PROMPT} tokens, k = {RANK}, bfloat16 wire")
    print(
        f"{'link':>14} {'batch':>5} {'method':>9} {'prompt s':>9} {'ms per token':>13} {'delay floor ms':>15} {'bytes/token/boundary':>21}"
    )
    for text in arguments.links:
        links = parse_links(text, STAGES - 1)
        with lab(links, hosts=STAGES) as net:
            # One link for all is a star: the picked id takes one delay to any stage; different links are a chain.
            back = links[0].delay if len(set(links)) == 1 else sum(link.delay for link in links)
            floor = 1e3 * (sum(link.delay for link in links) + back)
            for batch in arguments.batches:
                for method in ("none", "subspace"):
                    r = run(net.hosts, method, batch, arguments.tokens)
                    print(
                        f"{text:>14} {batch:>5} {method:>9} {r['prompt_s']:>9.2f} {r['token_ms']:>13.1f} {floor:>15.1f} {r['bytes']:>21}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
