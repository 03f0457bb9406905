"""What a token teaches each method, in tiers. Results are kept in docs/learning-N.json as they come, and tabled in learning.md.

    python benchmarks/learning.py --tier 1 [--jobs 2] [--only NAME ...] [--plot]

Every run is one process with one thread: the loss doesn't depend on the number of stages. Tier 1: d = 128, 8 layers,
4 segments, 1 M tokens; tier 2: d = 192, 3 M tokens, two seeds (one for swept rates); tier 3: one pair for 20 M tokens;
tier 4: tier 1 at another width and another depth. What is stored isn't run again, and a run that was cut goes on from its
last checkpoint in runs/.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinpipe.config import Config, dump, from_dict
from thinpipe.data import prepare
from thinpipe.metrics import read_events, write_whole
from thinpipe.report import COLOURS, DPI, clean

DOCS = Path(__file__).parents[1] / "docs"
RUNS = Path(__file__).parents[1] / "runs"
Groups = dict[str, dict[str, Any]]


def sizes(width: int, tokens: float) -> Groups:
    steps = round(tokens / (16 * 128))
    return {
        "model": {"width": width, "layers": 8, "heads": 4, "hidden": round(8 * width / 3 / 16) * 16, "context": 128},
        "data": {"vocab": 2048},
        "compression": {"segments": 4},
        "pipeline": {"stages": 1, "micro_batches": 1},
        "train": {
            "steps": steps,
            "batch": 16,
            "eval_every": steps // 8,
            "eval_batches": 16,
            "watch_every": 0,
            "sample": "",
        },
        "optim": {"lr": 8e-3, "warmup": 50},
        "run": {"precision": "float32"},  # the same on every machine, whatever its cores multiply natively
    }


def compressed(method: str, rank: int = 0, **more: Any) -> Groups:
    return {"compression": {"method": method} | ({"rank": rank} if rank else {}) | more}


BEST: dict[str, Any] = {"wire": "int4", "stage_table": "full", "local_loss": 0.3}
LOCAL = "projected, tables, local loss"
BEST_NAME = f"{LOCAL}, int4"


def rate(lr: float) -> Groups:
    return {"optim": {"lr": lr}}


SLOW = rate(4e-3)  # at d = 128 dense's best rate is 8e-3; there the others stumble in their first hundred steps


def packed(method: str, d: int, ratio: int, bits: int = 4, **more: Any) -> Groups:
    """The most numbers in `bits` that fit, beside their scale, into 1/ratio of a dense stream's bytes; as BEST otherwise."""
    return compressed(method, (2 * d // ratio - 2) * 8 // bits, **BEST | {"wire": f"int{bits}"} | more) | rate(6e-3)


def screening(d: int) -> dict[str, Groups]:
    """Every method and ratio; 1/8 is d/8 numbers in bfloat16."""
    dense = compressed("none")
    runs: dict[str, Groups] = {"dense": dense, "dense, Muon": dense | {"optim": {"hidden": "muon"}}}
    runs |= {f"dense, lr {lr:g}": dense | rate(lr) for lr in (2e-3, 4e-3, 1.2e-2, 1.6e-2)}
    runs["dense, tables"] = compressed("none", stage_table="full")
    runs["dense, tables, local loss"] = compressed("none", stage_table="full", local_loss=0.3)
    for ratio in (32, 16, 8, 64):
        runs[f"{BEST_NAME}, 1/{ratio}"] = packed("projected", d, ratio)
        runs[f"subspace 1/{ratio}"] = compressed("subspace", d // ratio) | SLOW
    for ratio in (32, 16, 8, 64):
        runs[f"subspace, tables, local loss, int4, 1/{ratio}"] = packed("subspace", d, ratio) | SLOW
        runs[f"projected 1/{ratio}"] = compressed("projected", d // ratio) | SLOW
    # One number of two bytes a token.
    runs |= {f"{method} 1/{d}": compressed(method, 1) | SLOW for method in ("subspace", "lowrank")}
    runs[f"{LOCAL} 1/{d}"] = compressed("projected", 1, stage_table="full", local_loss=0.3) | rate(6e-3)
    # One change at a time to the best at 1/32.
    runs["projected, tables, int4, 1/32"] = packed("projected", d, 32, local_loss=0.0)
    runs["projected, tables, int4, 1/32, static rows of 0.5"] = packed("projected", d, 32, local_loss=0.0, static_scale=0.5)
    runs["projected, tables, int4, 1/32, lr 0.008"] = packed("projected", d, 32, local_loss=0.0) | rate(8e-3)
    runs["projected, int4, 1/32"] = packed("projected", d, 32, stage_table=0, local_loss=0.0)
    runs |= {f"{BEST_NAME}, 1/32, weight {w:g}": packed("projected", d, 32, local_loss=w) for w in (0.1, 1.0)}
    runs |= {f"{LOCAL}, int{b}, 1/{r}": packed("projected", d, r, b) for b in (8, 2) for r in (32, 16, 8)}
    for wire, k in (("bfloat16", 12), ("bfloat16", 28), ("int8", 28), ("int4", 20), ("int4", 40)):
        runs[f"{LOCAL}, {wire}, {k} numbers"] = compressed("projected", k, **BEST | {"wire": wire}) | rate(6e-3)
    runs["projected, tables of rank 32, local loss, int4, 1/32"] = packed("projected", d, 32, stage_table=32)
    for layers in ([1, 2, 2, 3], [3, 2, 2, 1]):
        name = f"{BEST_NAME}, 1/32, layers " + " ".join(map(str, layers))
        runs[name] = packed("projected", d, 32) | {"pipeline": {"layers_per_segment": layers}}
    runs |= {f"{BEST_NAME}, 1/{ratio}, lr 0.008": packed("projected", d, ratio) | rate(8e-3) for ratio in (32, 16)}
    runs |= {f"{BEST_NAME}, 1/{ratio}, lr 0.004": packed("projected", d, ratio) | SLOW for ratio in (32, 16)}
    runs |= {f"{BEST_NAME}, 1/{ratio}, gradients to the nearest": packed("projected", d, ratio, rounding="nearest") for ratio in (32, 16)}
    runs[f"{BEST_NAME}, 1/32, Muon"] = packed("projected", d, 32) | {"optim": {"lr": 6e-3, "hidden": "muon"}}
    # Lossy: the stream itself, coded.
    runs |= {f"topk 1/{ratio}": compressed("topk", d // (2 * ratio)) | SLOW for ratio in (16, 8, 64)}
    runs |= {f"lowrank 1/{ratio}": compressed("lowrank", d // ratio) | SLOW for ratio in (16, 8, 64)}
    runs |= {f"quantize {bits} bits": compressed("quantize", wire=f"int{bits}") | SLOW for bits in (1, 2, 4, 8)}
    runs["quantize 1 bit, nearest"] = compressed("quantize", wire="int1", rounding="nearest") | SLOW
    # What the paper assumes, and its method's own settings.
    eighth = {"method": "subspace", "rank": d // 8}
    runs |= {f"{method} 1/32, lr 0.008": compressed(method, d // 32) for method in ("subspace", "projected")}
    runs["subspace 1/8, Gaussian table"] = compressed(**eighth, static="gaussian") | SLOW
    # 488 steps: the default, every 500, is never.
    runs["subspace 1/8, moved every 50"] = compressed(**eighth, move_every=50) | SLOW
    runs["subspace 1/8, moved every 50, step 0.5"] = compressed(**eighth, move_every=50, move_step=0.5) | SLOW
    runs["subspace 1/8, A_T from E U"] = compressed(**eighth, embedding_start=1.0) | SLOW
    runs["subspace 1/8, A_T from 0"] = compressed(**eighth, embedding_start=0.0) | SLOW
    runs["subspace 1/8, int8"] = compressed(**eighth, wire="int8") | SLOW
    runs["subspace 1/8, wider MLP"] = compressed(**eighth) | SLOW | {"model": {"hidden": round(10 * d / 3 / 16) * 16}}
    return runs


def main_tier(d: int) -> dict[str, Groups]:
    """At this width everything wants half of tier 1's rate: dense at 8e-3 ends 6.7 % above itself at 4e-3."""
    best, second = LOCAL, "projected, tables"
    runs: dict[str, Groups] = {"dense": compressed("none") | rate(4e-3)}
    runs[f"{best}, int4, 1/32"] = packed("projected", d, 32) | rate(4e-3)
    runs["subspace 1/32"] = compressed("subspace", d // 32) | rate(2e-3)
    runs["dense, tables, local loss"] = compressed("none", stage_table="full", local_loss=0.3) | rate(4e-3)
    for ratio in (16, 8):
        runs[f"{best}, int8, 1/{ratio}"] = packed("projected", d, ratio, 8) | rate(4e-3)
        runs[f"subspace 1/{ratio}"] = compressed("subspace", d // ratio) | rate(2e-3)
    runs["topk 1/16"] = compressed("topk", d // 32) | rate(2e-3)
    runs[f"{second}, int4, 1/32"] = packed("projected", d, 32, local_loss=0.0) | rate(4e-3)
    runs |= {f"{second}, int8, 1/{r}": packed("projected", d, r, 8, local_loss=0.0) | rate(4e-3) for r in (16, 8)}
    runs[f"{best}, int4, 1/16"] = packed("projected", d, 16) | rate(4e-3)
    runs["dense, tables"] = compressed("none", stage_table="full") | rate(4e-3)
    runs |= {f"dense, lr {lr:g}": compressed("none") | rate(lr) for lr in (2e-3, 8e-3)}
    runs |= {f"{best}, int4, 1/32, lr {lr:g}": packed("projected", d, 32) | rate(lr) for lr in (2e-3, 6e-3)}
    runs["subspace 1/32, lr 0.004"] = compressed("subspace", d // 32) | rate(4e-3)
    runs["subspace 1/8, basis frozen"] = compressed("subspace", d // 8, move_every=0) | rate(2e-3)
    return runs


def shaped(d: int, layers: int, name: str) -> str:
    return f"d {d}, {layers} layers, {name}"


def sideways() -> dict[str, Groups]:
    """Gap against k at another width and another depth."""
    runs: dict[str, Groups] = {}
    for d, layers in ((64, 8), (128, 16)):
        shape: Groups = {"model": sizes(d, 1)["model"] | {"layers": layers}}
        rows = {"dense": compressed("none")}
        for ratio in (8, 16, 32):
            rows[f"subspace 1/{ratio}"] = compressed("subspace", d // ratio) | SLOW
            rows[f"{BEST_NAME}, 1/{ratio}"] = packed("projected", d, ratio)
        rows[eight := f"{LOCAL}, int8, 1/16"] = packed("projected", d, 16, 8)
        if layers == 16:
            rows |= {f"{name}, lr 0.004": rows[name] | SLOW for name in ("dense", eight)}
        runs |= {shaped(d, layers, name): groups | shape for name, groups in rows.items()}
    return runs


class Tier(NamedTuple):
    base: Groups
    runs: dict[str, Groups]
    seeds: int = 1

    def wanted(self) -> list[tuple[str, int]]:
        """Names and seeds; a swept learning rate has one."""
        return [(name, seed) for seed in range(self.seeds) for name in self.runs if seed == 0 or ", lr " not in name]


PAIR = ("dense", f"{BEST_NAME}, 1/32")
TIERS = {
    1: Tier(sizes(128, 1e6), screening(128)),
    2: Tier(sizes(192, 3e6), main_tier(192), seeds=2),
    3: Tier(sizes(192, 20e6), {name: main_tier(192)[name] for name in PAIR}),
    4: Tier(sizes(128, 1e6), sideways()),
}


def merged(*parts: Groups) -> Config:
    groups: Groups = {}
    for part in parts:
        for group, values in part.items():
            groups[group] = groups.get(group, {}) | values
    return from_dict(groups).check()


def train(config: Config, run: Path) -> dict[str, Any]:
    """Train in a folder of its own, which goes when the run has ended; one that was cut goes on from there."""
    toml = run.with_name(run.name + ".toml")
    run.parent.mkdir(parents=True, exist_ok=True)
    toml.write_text(dump(config))
    command = [sys.executable, "-m", "thinpipe", "train", str(toml), "--run.dir", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"ended with exit status {done.returncode}").splitlines()[-1])
    result = json.loads(done.stdout.splitlines()[-1])
    if result["val_loss"] is None:
        raise RuntimeError(f"its validation loss is not a number at the end; {run} is kept")
    evals = {
        e["step"]: round(e["val_loss"], 5) for e in read_events(run / "metrics.jsonl") if e["event"] == "eval" and e["val_loss"] is not None
    }
    data = prepare(config)
    shutil.rmtree(run)
    toml.unlink()
    keys = ("val_loss", "tokens", "parameters", "wire_bytes_per_token", "compression", "refused_steps", "seconds_per_step")
    return {key: result[key] for key in keys} | {"epochs": result["tokens"] / len(data.train), "curve": sorted(evals.items())}


def stored(tier: int) -> dict[str, Any]:
    path = DOCS / f"learning-{tier}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


Results = dict[str, dict[str, dict[str, Any]]]  # by name and seed


def by_name(tier: int) -> Results:
    """Each run's results, of the seeds that its dense run has too."""
    groups: Results = {}
    for key, row in stored(tier).items():
        name, _, seed = key.partition("#")
        groups.setdefault(name, {})[seed] = row
    if tier == 4:  # tier 1 has the middle one of the shapes
        rows = {re.sub(r"d \d+, \d+ layers, ", "", name) for name in TIERS[4].runs}
        groups |= {shaped(128, 8, name): results for name, results in by_name(1).items() if name in rows}
    shared = {name: rows.keys() & groups.get(dense_of(name), {}).keys() for name, rows in groups.items()}
    return {name: {seed: groups[name][seed] for seed in sorted(seeds)} for name, seeds in shared.items() if seeds}


def dense_of(name: str) -> str:
    """The dense run of the same shape."""
    shape = re.match(r"(d \d+, \d+ layers, )?", name)
    assert shape
    return shape.group() + "dense"


def gaps(groups: Results) -> dict[str, float]:
    """How far each run's loss is above that of dense with the same seed, in percent; the mean over seeds."""
    return {
        name: 100 * mean(row["val_loss"] / groups[dense_of(name)][seed]["val_loss"] - 1 for seed, row in rows.items())
        for name, rows in groups.items()
    }


def savings(groups: Results) -> dict[str, float]:
    """How many times fewer bytes each run has than dense; the same for all seeds."""
    return {name: next(iter(rows.values()))["compression"] for name, rows in groups.items()}


def table(tier: int, groups: Results) -> str:
    """The results so far as Markdown, best first at each number of bytes."""
    lines = [
        "| run | fewer bytes | validation loss | perplexity | gap | parameters, M | tokens per parameter | epochs | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    gap, saved = gaps(groups), savings(groups)
    for name in sorted(groups, key=lambda name: (dense_of(name), saved[name], gap[name])):
        rows = list(groups[name].values())
        first, losses = rows[0], [row["val_loss"] for row in rows]
        spread = f" ± {(max(losses) - min(losses)) / 2:.3f}" if len(losses) > 1 else ""
        lines.append(
            f"| {name} | {saved[name]:.3g}× | {mean(losses):.3f}{spread} | {math.exp(mean(losses)):.1f} | {gap[name]:+.1f}% "
            f"| {first['parameters'] / 1e6:.2f} | {first['tokens'] / first['parameters']:.2f} | {first['epochs']:.2f} | {len(rows)} |"
        )
    done, wanted = stored(tier), TIERS[tier].wanted()
    return "\n".join([*lines, "", f"{sum(f'{name}#{seed}' in done for name, seed in wanted)} of {len(wanted)} runs."])


def publish(tier: int, text: str) -> None:
    """Put a table into its place in learning.md; ends with an error where there is none."""
    page = DOCS / "learning.md"
    place = re.compile(rf"(?<=<!-- tier {tier} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    written, places = place.subn(lambda _: text + "\n\n", page.read_text(), count=1)
    if not places:
        sys.exit(f"{page} has no place for this table; give it the lines <!-- tier {tier} --> and <!-- end -->")
    write_whole(page, written)


def plot(tier: int, groups: Results) -> Path | None:
    """The picture's path; None, and nothing drawn, where a run is missing without which it says nothing."""
    if tier == 3 and not all(set(PAIR) <= runs.keys() for runs in (by_name(2), groups)):
        return None
    figure = Figure(figsize=(5.0, 5.2), layout="constrained")
    axes = figure.add_subplot()
    clean(axes)
    axes.axhline(0, color="#333333", linewidth=0.8)
    axes.set_ylabel("validation loss above dense (%)")
    {3: over_tokens, 4: over_shapes}.get(tier, over_bytes)(axes, groups)
    figure.legend(loc="outside upper left", frameon=False, labelcolor="linecolor", fontsize=9)
    path = DOCS / f"learning-{tier}.png"
    figure.savefig(path, dpi=DPI)
    return path


def over_bytes(axes: Axes, groups: Results) -> None:
    """All methods, each a line over the ratios it was run at."""
    gap, saved = gaps(groups), savings(groups)
    families = ("subspace", "projected", "subspace, tables, local loss, int4", BEST_NAME)
    families += (f"{LOCAL}, int8", "quantize", "topk", "lowrank", LOCAL, "projected, tables")
    endings = {"quantize": r" \d bits", "projected, tables": r", int\d, 1/\d+"}
    for family, colour, marker in zip(families, (*COLOURS, "#999999", "#8c564b", "#6a3d9a"), "os^vDPX*ph", strict=True):
        # Rows as they come, without those in which something else is tried.
        plain = re.compile(re.escape(family) + endings.get(family, r",? 1/\d+"))
        members = sorted((name for name in gap if plain.fullmatch(name)), key=lambda name: saved[name])
        if members:
            x, y = [saved[name] for name in members], [gap[name] for name in members]
            axes.plot(x, y, marker=marker, color=colour, label=family, linewidth=1.3)
    if (control := "dense, tables, local loss") in gap:
        axes.axhline(gap[control], color="#333333", linewidth=0.8, linestyle="--", label=control)
    ratio_axis(axes, (2, 4, 8, 16, 32, 64, 128))


def over_tokens(axes: Axes, groups: Results) -> None:
    """Inside this tier's runs, and inside tier 2's shorter ones, whose learning rate is at its end sooner."""
    dense, best = PAIR
    for colour, length, runs in zip(COLOURS, ("3 M", "20 M"), (by_name(2), groups), strict=False):
        one, other = (dict(runs[name]["0"]["curve"]) for name in (dense, best))
        steps = sorted(one.keys() & other.keys())
        tokens = [step * 16 * 128 / 1e6 for step in steps]
        gap = [100 * (other[step] / one[step] - 1) for step in steps]
        axes.plot(tokens, gap, marker="o", color=colour, label=f"{best}; {length} tokens", linewidth=1.3)
    axes.set_xlabel("tokens (millions)")


def over_shapes(axes: Axes, groups: Results) -> None:
    """The paper's method, and the best with the better of its wires at each ratio."""
    gap = gaps(groups)
    shapes = sorted({dense_of(name).removesuffix("dense") for name in groups})
    ratios = (8, 16, 32)
    for method, wires, marker, line in (("subspace", ("",), "o", "--"), (LOCAL, (", int4,", ", int8,"), "v", "-")):
        for shape, colour in zip(shapes, COLOURS, strict=False):
            rows = [[f"{shape}{method}{wire} 1/{ratio}" for wire in wires] for ratio in ratios]
            best = [min((gap[name] for name in names if name in gap), default=math.nan) for names in rows]
            axes.plot(ratios, best, marker=marker, linestyle=line, color=colour, label=shape + method, linewidth=1.3)
    ratio_axis(axes, ratios)


def ratio_axis(axes: Axes, ratios: tuple[int, ...]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ratios, [f"{ratio}×" for ratio in ratios])
    axes.set_xlabel("fewer bytes than a dense bfloat16 stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", type=int, choices=TIERS, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="runs beside each other, a thread each")
    parser.add_argument("--only", nargs="+", help="runs by name")
    parser.add_argument("--plot", action="store_true", help="only the table and the plot of what is there")
    arguments = parser.parse_args()
    tier = TIERS[arguments.tier]
    results = stored(arguments.tier)
    if unknown := set(arguments.only or []) - set(tier.runs):
        parser.error(f"no run {', '.join(sorted(unknown))}; there are: {'; '.join(tier.runs)}")
    wanted = [
        (f"{name}#{seed}", merged(tier.base, tier.runs[name], {"run": {"seed": seed}}))
        for name, seed in tier.wanted()
        if name in (arguments.only or tier.runs)
    ]
    waiting = [] if arguments.plot else [(key, config) for key, config in wanted if key not in results]

    def one(job: tuple[str, Config]) -> None:
        key, config = job
        try:
            results[key] = train(config, RUNS / f"learning-{arguments.tier}" / key.replace("/", ":"))
        except RuntimeError as error:
            return print(f"{key}: {error}", flush=True)
        write_whole(DOCS / f"learning-{arguments.tier}.json", json.dumps(results, indent=1) + "\n")
        print(f"{key}: {results[key]['val_loss']}", flush=True)

    if waiting:
        prepare(waiting[0][1])
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(one, waiting))
    groups = by_name(arguments.tier)
    if not groups:
        print("no dense run yet")
        return
    text = table(arguments.tier, groups)
    print(text)
    print(plot(arguments.tier, groups) or "no plot yet")
    publish(arguments.tier, text)


if __name__ == "__main__":
    main()
