"""The command `thinpipe`: what each command takes and prints. Errors are one or two lines; --debug shows the traceback."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import tyro

from .config import Config, ThinpipeError, load
from .errors import Stopped, tell
from .mesh import KEY

_Kind = TypeVar("_Kind")
_BOX = "│╭╮╰╯─ "


@dataclass(frozen=True, kw_only=True)
class Output:
    json: bool = False
    """Print one JSON object as the last line of stdout."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class Train(Output, Config):
    """Train a model in a pipeline.

    thinpipe train [CONFIG.toml] [--group.field value ...]. Without CONFIG: the config in --run.dir, or the embedded demo.
    Starts the stages on this machine and also runs under torchrun.
    """


@dataclass(frozen=True, kw_only=True)
class Verify(Output, Config):
    """Prove here that the pipeline computes what one process does: loss and every gradient, worst difference.

    thinpipe verify [CONFIG.toml] [--group.field value ...]. One process holds the whole model in float64: use a small one.
    """


@dataclass(frozen=True, kw_only=True)
class Eval(Output):
    """Validation loss, perplexity and bits per byte of a run's newest checkpoint, on its whole validation split."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run."""
    batches: int = 0
    """Validation batches at most (0: all)."""


@dataclass(frozen=True, kw_only=True)
class Generate(Output):
    """Write text with a run's newest checkpoint, streamed as it comes."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run."""
    prompt: Annotated[str, tyro.conf.arg(aliases=["-p"])]
    """What to continue."""
    new_tokens: int = 128
    """Tokens to write at most; an end of text or a full context ends it earlier."""
    temperature: float = 0.0
    """Spread of the draw (0: always the likeliest token)."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens of at least this probability."""
    seed: int = 0
    """Seed of the draw."""
    staged: bool = False
    """Decode over a pipeline of processes, k numbers per token and boundary, instead of in one."""
    stages: int | None = None
    """Processes of --staged (not given: the run's pipeline.stages)."""


@dataclass(frozen=True, kw_only=True)
class Export(Output):
    """Write a run's newest checkpoint as a Hugging Face folder that stock transformers loads; logits are compared first."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run."""
    out: Annotated[str, tyro.conf.Positional]
    """Folder to write; new or empty."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the written weights."""


@dataclass(frozen=True, kw_only=True)
class Plan(Output, Config):
    """Predict a run over given links: seconds per step, what binds, bytes, memory, days, beside the dense pipeline.

    thinpipe plan [CONFIG.toml] [--link RATE,DELAY] [--group.field value ...]. Nothing runs: the schedule's own actions are simulated.
    """

    link: str | None = None
    """Links, in place of plan.link: 80mbit,25ms, or one for each boundary joined by "/"."""
    timeline: str | None = None
    """Write the timeline of a step to this file, as PNG."""
    calibrate: bool = False
    """Measure what the stages cost on this machine, all of them at once, instead of counting for plan.gpu."""
    suggest: bool = False
    """Look for better stages, micro-batches and rank, and plan that instead."""


@dataclass(frozen=True, kw_only=True)
class Lab(Output, Config):
    """Train with every stage on a host of its own, over emulated links on this machine; the plan beside what was measured.

    thinpipe lab [CONFIG.toml] [--link RATE,DELAY[,loss=1%,jitter=16mbit,cc=bbr]] [--group.field value ...]. Linux, root or "unshare -rmn".
    """

    link: str | None = None
    """Links, in place of plan.link: 80mbit,25ms for all hosts, or one for each boundary joined by "/"."""


@dataclass(frozen=True, kw_only=True)
class Probe(Output, Config):
    """Measure the links between the machines of a run; recommend the order of its stages and the rank.

    thinpipe probe [CONFIG.toml] --network.rdzv HOST:PORT --network.nodes N [--group.field value ...], on each machine.
    All print the result.
    """


@dataclass(frozen=True, kw_only=True)
class Race(Output, Config):
    """Train several configs on the same data, order, seed and links: loss at equal tokens, at equal time, time to a loss.

    thinpipe race A.toml B.toml ... [--link RATE,DELAY | --link RATE,DELAY B.toml=unlimited] [--group.field value ...]. Overrides apply
    to all; the first is what the others are compared with.
    """

    rows: tyro.conf.Suppress[tuple[tuple[str, Config], ...]] = ()
    link: tuple[str, ...] = ()
    """Links in place of plan.link: for all, and CONFIG=LINK for one config."""
    target: float | None = None
    """Loss whose time counts (not given: the first config's final one)."""
    seeds: int = 1
    """Seeds to train each config with."""
    extend: int = 1
    """Who misses that loss trains once more with so many times the steps, as a row of its own; its gap is then not at equal tokens."""
    timing: Literal["auto", "lab", "planner"] = "auto"
    """What the seconds of a step are: measured over a few steps in the lab, or planned. auto: the lab where it can run."""
    out: str = "runs/race"
    """Folder of the runs and plots; what is finished in it is not trained again."""


@dataclass(frozen=True, kw_only=True)
class Report(Output):
    """Plots (PNG) and one HTML page of runs: loss against tokens, seconds and bytes, a step's timeline, ranks, moves, config."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders of runs."""
    out: str = "report"
    """Folder for the PNG files and report.html."""


@dataclass(frozen=True, kw_only=True)
class Status(Output):
    """How a run stands: step, loss, speed, what its links carry, bytes, restarts, refused steps, complaints."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run, or HOST:PORT of its run.prometheus."""


@dataclass(frozen=True, kw_only=True)
class Mesh(Output):
    """Who belongs to a run: an encrypted network (WireGuard) between its machines, and a firewall that passes nothing else."""


@dataclass(frozen=True, kw_only=True)
class MeshKey(Mesh):
    """Print this machine's public key; where it has none, make one, whose private half never leaves it. Root."""

    key: str = str(KEY)
    """File of the private key."""


@dataclass(frozen=True, kw_only=True)
class _MeshOf(Mesh):
    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MESH.toml")]
    """List of the machines: the same file on all of them, without a secret."""


@dataclass(frozen=True, kw_only=True)
class MeshAdd(_MeshOf):
    """Add a machine to the list; the first one begins it. Then copy the list to all machines, and `thinpipe mesh up` there."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """What the machine is called."""
    public_key: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="KEY")]
    """What `thinpipe mesh key` printed there; take it from a hand that you trust."""
    endpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[ENDPOINT]")] = ""
    """HOST or HOST:PORT where the others reach it from outside; left out for one machine behind NAT."""


@dataclass(frozen=True, kw_only=True)
class MeshRevoke(_MeshOf):
    """Take a machine off the list. The others shut it out when they have the new list and did `thinpipe mesh up`."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """What the machine is called."""


@dataclass(frozen=True, kw_only=True)
class MeshUp(_MeshOf):
    """Put this machine into the mesh, or apply a changed list without a break for the tunnels that stay. Root.

    The firewall then drops what comes from outside, except the tunnel, answers, ping, and the TCP ports under `open` in the list.
    """

    key: str = str(KEY)
    """File of this machine's private key."""


@dataclass(frozen=True, kw_only=True)
class MeshDown(_MeshOf):
    """Take this machine out: the device and the firewall's table go, nothing else is touched. Root."""


@dataclass(frozen=True, kw_only=True)
class MeshShow(_MeshOf):
    """The machines, and where the mesh is up what the tunnels carry. Root while it is up."""


MESH: dict[str, type[Mesh]] = {
    "key": MeshKey,
    "add": MeshAdd,
    "revoke": MeshRevoke,
    "up": MeshUp,
    "down": MeshDown,
    "show": MeshShow,
}


def _train(args: Train) -> dict[str, Any] | None:
    from .runner import train

    result = train(_config(args), tell, args.debug)
    if result is None:
        return None
    if not args.json:
        _table(f"run {result.run}", _trained(dataclasses.asdict(result)))
        if result.sample:
            print(f"\nthe model writes:\n{result.sample}")
    return dataclasses.asdict(result)


def _number(value: float | None, form: str) -> str:
    """A number of a result.json, where null stands for one that isn't finite."""
    return "no number" if value is None else format(value, form)


def _trained(r: dict[str, Any]) -> dict[str, str]:
    """A run's summary, for people."""
    return {
        "method": f"{r['method']}, {r['stages']} stages, {r['segments']} segments, {r['parameters']:,} parameters",
        "trained": f"{r['steps']} steps, {r['tokens']:,} tokens",
        "training loss": _number(r["train_loss"], ".4f"),
        "validation loss": _number(r["val_loss"], ".4f"),
        "speed": f"{_number(r['tokens_per_s'], ',.0f')} tokens/s, {_number(r['seconds_per_step'], '.3f')} s per step",
        "wire": f"{r['wire_bytes_per_token']:g} bytes per token, boundary and direction"
        + (" (measured)" if r["wire_measured"] else " (what the cuts would send)"),
        "compression": f"{_number(r['compression'], '.3g')}x against a dense bfloat16 stream ({r['dense_wire_bytes_per_token']:g} bytes)",
        "peak memory": ", ".join(f"{mb:,.0f}" for mb in r["peak_rss_mb"]) + " MB by stage",
    }


def _lab(args: Lab) -> dict[str, Any]:
    from .trial import train_in_lab

    config = _config(args)
    text, where = _link(args)
    r = train_in_lab(config, text, where, tell, args.debug)
    if not args.json:
        off = r["planned_seconds_per_step"] / r["seconds_per_step"] - 1
        links = {
            "links": f"asked {r['link']}, achieved {r['achieved_link']}",
            "planned": f"{r['planned_seconds_per_step']:.3f} s per step, {off:+.0%} against what was measured",
            "emulator": f"{r['emulator_cpu']:.0%} of a core",
        }
        _table(f"run {r['run']}", _trained(r) | links)
    return r


def _verify(args: Verify) -> dict[str, Any]:
    from .verify import verify

    with tempfile.TemporaryDirectory(prefix="thinpipe-verify-") as scratch:
        result = verify(_config(args), Path(scratch) / "run", args.debug)
    if not args.json:
        _table(
            f"{result['method']}, {result['segments']} segments on {result['stages']} stages, schedule {result['schedule']}",
            {
                f"pipeline against one process, {result['dtype']}": f"loss {result['loss_rel_diff']:.2e}, "
                f"gradients {result['grad_max_rel_diff']:.2e}",
                f"the same with the {result['wire']} wire": f"loss {result['wire_loss_rel_diff']:.2e}, "
                f"gradients {result['wire_grad_max_rel_diff']:.2e}",
                f"what rounding to {result['wire']} and float32 changes": f"loss {result['rounding_loss_rel_diff']:.2e} (not judged)",
                "verdict": "ok: the pipeline changes nothing" if result["ok"] else "NOT OK: the pipeline computes something else",
            },
        )
    return result


def _eval(args: Eval) -> dict[str, Any]:
    from .inference import evaluate

    result = evaluate(Path(args.run), args.batches)
    if not args.json:
        bits = result["bits_per_byte"]
        _table(
            f"run {args.run}, step {result['step']}",
            {
                "validation loss": f"{result['val_loss']:.4f} nats per token, over {result['tokens']:,} tokens",
                "perplexity": f"{result['perplexity']:.2f}",
                "bits per byte": "unknown (token files)" if bits is None else f"{bits:.4f}",
            },
        )
    return result


def _generate(args: Generate) -> dict[str, Any]:
    from .inference import Request, load_run, write, write_staged
    from .topology import connect

    if args.stages is not None and not (args.staged and args.stages > 0):
        raise ThinpipeError(f"--stages {args.stages} goes with --staged and is at least 1")
    names = [field.name for field in dataclasses.fields(Request)]
    request = Request(**{name: getattr(args, name) for name in names})
    if args.staged:
        print(request.prompt, end="", flush=True)
        return {"text": write_staged(Path(args.run), args.stages, request, args.debug)}
    text = ""
    with connect(60.0) as alone:
        pieces = write(load_run(Path(args.run)), alone, request)
        # The prompt is shown with the first piece: by then all is well with it.
        for piece in itertools.chain([request.prompt + next(pieces, "")], pieces):
            text += piece
            print(piece, end="", flush=True)
    print(flush=True)
    return {"text": text}


def _export(args: Export) -> dict[str, Any]:
    from .publish import export_run

    result = export_run(Path(args.run), Path(args.out), args.dtype)
    if not args.json:
        _table(
            f"{args.out}: step {result['step']}, {result['parameters']:,} parameters, {result['dtype']}",
            {
                "files": ", ".join(result["files"]),
                f"logits against {result['checked_with']}": f"largest difference {result['max_abs_logit_diff']:.2e} "
                f"(largest logit {result['max_abs_logit']:.1f})",
                "wire rounding at the cuts changed": f"{result['rounding_max_abs_logit_diff']:.2e} (a plain Llama has none)",
            },
        )
    return result


def _plan(args: Plan) -> dict[str, Any]:
    from .data import expected_vocab
    from .lab import parse_links
    from .planner import calibrate as calibrated
    from .planner import draw_timeline, find_gpu, plan, suggest

    config = _config(args).check()
    text, where = _link(args)
    links = parse_links(text, max(1, config.pipeline.stages - 1), where)
    gpu, vocab = find_gpu(config.plan.gpu), expected_vocab(config)
    costs = None
    if args.calibrate:
        from .calibrate import calibrate

        costs = calibrate(config, args.debug)
        gpu = calibrated(gpu, config, vocab, costs)
    suggestion = suggest(config, vocab, links, gpu) if args.suggest else None
    planned = suggestion.plan if suggestion else plan(config, vocab, links, gpu, costs=costs, tokens=config.plan.tokens)
    if args.timeline is not None:
        from .report import write_picture

        write_picture(Path(args.timeline), partial(draw_timeline, planned.timeline))
    result = planned.as_dict()
    if suggestion:
        chosen = suggestion.config
        result |= {"stages": chosen.pipeline.stages, "micro_batches": chosen.pipeline.micro_batches, "why": suggestion.why}
    if not args.json:
        beside = f", {planned.replicas} replicas" if planned.replicas > 1 else ""
        _table(
            f"{config.compression.method} over {text}, {gpu.name} per stage{beside}" + (f": {suggestion.why}" if suggestion else ""),
            {
                "step": f"{planned.seconds_per_step:.3f} s, {planned.tokens_per_s:,.0f} tokens/s; bound by {planned.bound}",
                "no schedule can beat": f"{planned.least_seconds_per_step:.3f} s",
                "dense": f"{planned.dense_seconds_per_step:.3f} s per step: {planned.speedup_vs_dense:.1f}x slower per step (not per loss)",
                "wire": f"{planned.wire_bytes_per_token:g} bytes per token, boundary and direction",
                "memory": ", ".join(f"{gb:.1f}" for gb in planned.memory_gb) + " GB by stage" + ("" if planned.fits else " - DOES NOT FIT"),
                "time": f"{planned.days:,.1f} days",
            },
        )
    return result


def _probe(args: Probe) -> dict[str, Any]:
    from .probe import describe, probe

    result = probe(_config(args), tell, args.debug)
    if not args.json:
        print(describe(result))
    return result


def _race(args: Race) -> dict[str, Any]:
    from .race import Entry, race

    named = dict(text.split("=", 1) for text in args.link if ".toml=" in text)
    common = [text for text in args.link if ".toml=" not in text]
    if len(common) > 1:
        raise ThinpipeError(f"--link {' '.join(args.link)}: give one link for all, and CONFIG.toml=LINK for one config")
    files = [name for name, _ in args.rows]
    if unknown := [name for name in named if name not in files]:
        raise ThinpipeError(f"--link names {unknown[0]}, which is not in the race; its configs are {', '.join(files)}")
    entries = [
        Entry(name=Path(name).stem, config=config, link=named.get(name, common[0] if common else config.plan.link))
        for name, config in args.rows
    ]
    options: dict[str, Any] = {
        "target": args.target,
        "seeds": args.seeds,
        "extend": args.extend,
        "timing": args.timing,
        "debug": args.debug,
    }
    result = race(entries, Path(args.out), say=tell, **options)
    if not args.json:
        _print_race(result)
    return result


def _print_race(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"time to a validation loss of {result['target_loss']:.4f}; a step's seconds from the {result['timed_by']}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for heading in ("config", "bytes", "loss", "spread", "gap", "steps", "s/step", "time", "speed-up"):
        name = heading == "config"  # gives way where the terminal is narrow; figures don't
        table.add_column(heading, no_wrap=not name, overflow="fold", justify="left" if name else "right")
    for r in result["rows"]:
        reached = r["time_to_target"] is not None
        table.add_row(
            r["name"], f"1/{r['compression']:.3g}", f"{r['final_val_loss']:.4f}", f"{r['final_val_loss_spread']:.4f}",
            f"{r['gap_vs_first']:+.1%}", f"{r['steps_to_target']:.0f}" if reached else "never", f"{r['seconds_per_step']:.3f}",
            f"{r['time_to_target']:,.0f} s" if reached else "", f"{r['speedup_vs_first']:.2f}x" if r["speedup_vs_first"] else "",
        )  # fmt: skip
    console = Console()
    console.width = max(80, console.width)
    console.print(table, markup=False, highlight=False)
    print("\n".join(result["files"]))


def _report(args: Report) -> dict[str, Any]:
    from .page import report

    if not args.runs:
        raise ThinpipeError("no run given; name at least one run's folder")
    result = report([Path(run) for run in args.runs], Path(args.out))
    if not args.json:
        print("\n".join(result["files"]))
    return result


def _status(args: Status) -> dict[str, Any]:
    from .status import describe, status

    told = status(args.run)
    if not args.json:
        _table(f"{told['run']}: {told['method']}, {told['stages']} stages", describe(told))
    return told


def _mesh(args: Mesh) -> dict[str, Any]:
    from . import mesh

    if isinstance(args, MeshKey):
        public = mesh.make_key(Path(args.key))
        if not args.json:
            print(public)
        return {"key": public, "file": args.key}
    assert isinstance(args, _MeshOf)
    file = Path(args.file)
    if isinstance(args, MeshAdd):
        machines = mesh.add(mesh.load(file) if file.exists() else mesh.Mesh(), args.name, args.public_key, args.endpoint)
        mesh.save(machines, file)
        added = machines.machines[-1]
        tell(f"{added.name} is {added.address} in {file}; copy the file to all machines, and 'thinpipe mesh up {file}' on each")
        return dataclasses.asdict(added)
    machines = mesh.load(file)
    if isinstance(args, MeshRevoke):
        mesh.save(mesh.revoke(machines, args.name), file)
        tell(f"{args.name} is off {file}; it is shut out where the new file is copied to and 'thinpipe mesh up {file}' was run")
        return {"revoked": args.name}
    if isinstance(args, MeshDown):
        was_up = mesh.bring_down(machines)
        tell(f"{machines.device} is down" if was_up else f"{machines.device} was not up")
        return {"was_up": was_up}
    if isinstance(args, MeshUp):
        here = mesh.bring_up(machines, Path(args.key))
        passed = ", ".join([f"UDP {machines.port} (the tunnel)", *(f"TCP {port}" for port in machines.open)])
        tell(f"{machines.device} is up: this is {here.name}, {here.address}; from outside the firewall passes {passed}")
        first = machines.machines[0].address
        tell(f"train with --network.rdzv {first}:29400 --network.nodes {len(machines.machines)} --network.addr {here.address}")
        return dataclasses.asdict(here)
    told = mesh.describe(machines)
    if not args.json:
        _table(f"mesh {told['mesh']}, {told['subnet']}: {'up' if told['up'] else 'down'} here", mesh.lines(told))
    return told


COMMANDS: dict[str, tuple[type[Output], Callable[[Any], dict[str, Any] | None]]] = {
    "train": (Train, _train),
    "verify": (Verify, _verify),
    "eval": (Eval, _eval),
    "generate": (Generate, _generate),
    "export": (Export, _export),
    "report": (Report, _report),
    "plan": (Plan, _plan),
    "probe": (Probe, _probe),
    "lab": (Lab, _lab),
    "race": (Race, _race),
    "status": (Status, _status),
    "mesh": (Mesh, _mesh),
}


def _config(args: Config) -> Config:
    return Config(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Config)})


def _link(args: Plan | Lab) -> tuple[str, str]:
    """The links that hold, and what the user calls them."""
    return (args.link, "--link") if args.link is not None else (args.plan.link, "plan.link")


def _table(title: str, rows: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table, markup=False, highlight=False)


def _usage() -> str:
    lines = ["usage: thinpipe COMMAND ...", "", "Train transformer language models in pipeline parallel over thin links.", ""]
    lines += [f"  {name:10}{(kind.__doc__ or '').splitlines()[0]}" for name, (kind, _) in COMMANDS.items()]
    return "\n".join([*lines, "", "thinpipe COMMAND --help explains every option. Start with: thinpipe train"])


def parse(argv: Sequence[str]) -> Output:
    """The arguments of one command; a CONFIG is read first, options override its fields.

    Raises:
        ThinpipeError: unknown command or option, bad value, bad CONFIG.
        SystemExit: for --help.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        raise SystemExit(0 if argv else 2)
    if (odd := next((argument for argument in argv if not _is_text(argument)), None)) is not None:
        raise ThinpipeError(f"the argument {odd!r} is not UTF-8; write it, or rename the file, in plain letters")
    name, *rest = argv
    if name not in COMMANDS:
        raise ThinpipeError(f"unknown command {name!r}; commands are {', '.join(COMMANDS)}")
    kind = COMMANDS[name][0]
    if kind is Race:
        return _parse_race(rest)
    if kind is Mesh:
        return _parse_mesh(rest)
    default: dict[str, Any] = {}
    if issubclass(kind, Config):
        base = Config()
        if rest and not rest[0].startswith("-"):
            base = load(rest.pop(0))
        elif (stored := _stored_config(rest)) is not None:
            base = load(stored)
        default = {"default": kind(**{field.name: getattr(base, field.name) for field in dataclasses.fields(Config)})}
    return _options(kind, name, rest, default)


def _parse_race(rest: Sequence[str]) -> Race:
    """Every config in turn with the same overrides."""
    count = next((i for i, argument in enumerate(rest) if argument.startswith("-")), len(rest))
    files, options = rest[:count], rest[count:]
    if not files and not {"-h", "--help"} & set(options):
        raise ThinpipeError("race needs the configs to compare: thinpipe race dense.toml subspace.toml --link 80mbit,25ms")
    rows = []
    for file in files or [""]:
        base = load(file) if file else Config()
        default = Race(**{field.name: getattr(base, field.name) for field in dataclasses.fields(Config)})
        parsed = _options(Race, "race", options, {"default": default})
        rows.append((file, _config(parsed)))
    return dataclasses.replace(parsed, rows=tuple(rows))


def _parse_mesh(rest: Sequence[str]) -> Mesh:
    """What follows `mesh`: one of its own commands."""
    if not rest or rest[0] in ("-h", "--help"):
        lines = ["usage: thinpipe mesh COMMAND ...", "", Mesh.__doc__ or "", ""]
        lines += [f"  {name:10}{(kind.__doc__ or '').splitlines()[0]}" for name, kind in MESH.items()]
        print("\n".join([*lines, "", "thinpipe mesh COMMAND --help explains more, docs/mesh.md what is protected and what isn't."]))
        raise SystemExit(0 if rest else 2)
    if rest[0] not in MESH:
        raise ThinpipeError(f"unknown command 'mesh {rest[0]}'; they are mesh {', mesh '.join(MESH)}")
    return _options(MESH[rest[0]], f"mesh {rest[0]}", rest[1:], {})


def _options(kind: type[_Kind], name: str, rest: Sequence[str], default: dict[str, Any]) -> _Kind:
    """The options of a command over its defaults."""
    given = [argument.partition("=")[0].replace("_", "-") for argument in rest if argument.startswith("--") and len(argument) > 2]
    if twice := next((option for option in given if given.count(option) > 1), None):
        raise ThinpipeError(f"{twice} is given twice; keep one")
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(kind, prog=f"thinpipe {name}", args=rest, description=kind.__doc__, **default)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ThinpipeError(_plain_error(told.getvalue(), name)) from None


def _stored_config(rest: Sequence[str]) -> Path | None:
    """The config in the folder that --run.dir names, if there is one."""
    for i, argument in enumerate(rest):
        if argument.startswith("--run.dir"):
            value = argument.partition("=")[2] or (rest[i + 1] if i + 1 < len(rest) else "")
            stored = Path(value) / "config.toml"
            if value and stored.is_file():
                return stored
    return None


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:  # Python keeps such bytes as halves of surrogate pairs
        return False
    return True


def _plain_error(box: str, command: str) -> str:
    """tyro's boxed message as one or two lines."""
    lines = [line.strip(_BOX) for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    lines = [line for line in lines if line.strip("-")][1:]  # the first is the box's title; dashes are its sides in ASCII
    ends = [i for i, line in enumerate(lines) if line.startswith(("Argument helptext", "For full helptext"))]
    text = " ".join(lines[: ends[0] if ends else None])
    text = re.sub(r" *\(default:.*?\)", "", text.removeprefix("Error parsing ")).strip().rstrip(".")
    text, _, meant = text.partition(" Perhaps you meant: ")
    if options := dict.fromkeys(re.findall(r"--[\w.-]+", meant)):
        text += f"; perhaps you meant {' or '.join(options)}"
    elif text.endswith(".toml"):
        text += "; a CONFIG.toml goes before the options"
    return f"{text[:300]}; see thinpipe {command} --help"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 done (verify: and ok), 1 failed, 2 bad input, 130 stopped after saving."""
    argv = sys.argv[1:] if argv is None else argv
    # On a busy machine OpenMP threads that spin while they wait slow each other down tenfold; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug = "--debug" in argv
    if not debug:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns when a peer's address has no name
    try:
        args = parse(argv)
        result = COMMANDS[argv[0]][1](args)
        if args.json and result is not None:
            from .metrics import to_json

            print(to_json(result))
        status = 0 if result is None or result.get("ok", True) else 1
    except ThinpipeError as error:
        if debug:
            raise
        tell(f"thinpipe: {error}")
        status = error.status
    except (KeyboardInterrupt, Stopped):
        status = 130
    except OSError as error:  # one that nobody expected: a name too long, a disk that fails
        if debug:
            raise
        tell(f"thinpipe: {error.filename or 'the system'}: {error.strerror or error}; give another path, or mend that disk")
        status = 2
    except Exception as error:
        if debug:
            raise
        tell(f"thinpipe: {type(error).__name__}: {error}\nThis is a mistake of thinpipe's; --debug shows more.")
        status = 1
    sys.stdout.flush()
    if "RANK" in os.environ:
        os._exit(status)  # peers may be gone: no goodbye over the network; and see worker.py
    raise SystemExit(status)
