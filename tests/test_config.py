"""Config: the demo is the default, every field can be set from a file and the command line, every mistake is one line."""

import contextlib
import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from hypothesis import given
from hypothesis import strategies as st

from thinpipe import cli
from thinpipe.config import PRESETS, Config, ThinpipeError, dump, from_dict, load

ROOT = Path(__file__).parents[1]

FIELDS = {
    "run": {"dir", "name", "seed", "device", "precision", "tensorboard", "prometheus"},
    "model": {
        "preset",
        "width",
        "layers",
        "heads",
        "kv_heads",
        "hidden",
        "context",
        "vocab",
        "tied",
        "rope_theta",
        "norm_eps",
        "hf_config",
        "init_from",
    },
    "data": {"corpus", "files", "dataset", "split", "field", "dtype", "tokenizer", "vocab", "validation", "source", "cache"},
    "compression": {
        "method",
        "rank",
        "segments",
        "wire",
        "rounding",
        "stage_table",
        "local_loss",
        "static",
        "static_scale",
        "embedding_start",
        "static_seed",
        "move_every",
        "move_step",
        "init_from",
    },
    "pipeline": {"stages", "micro_batches", "schedule", "warmup", "layers_per_segment", "replicas", "recompute"},
    "train": {
        "steps",
        "stop_at",
        "batch",
        "eval_every",
        "eval_batches",
        "checkpoint_every",
        "keep_last",
        "keep_every",
        "max_refused",
        "roll_back_above",
        "watch_every",
        "sample",
    },
    "optim": {"lr", "warmup", "decay", "weight_decay", "betas", "eps", "hidden", "clip"},
    "network": {"timeout", "restarts", "patience", "rdzv", "nodes", "addr", "replica", "node_rank", "insecure"},
    "average": {"every", "rank", "outer_lr", "outer_momentum", "wire"},
    "plan": {"link", "gpu", "tokens"},
}


def test_the_list_of_options_is_frozen() -> None:
    """A new option is a decision: it changes this list, and the documentation with it."""
    groups = {f.name: {g.name for g in dataclasses.fields(f.default_factory())} for f in dataclasses.fields(Config)}  # type: ignore[misc]
    assert groups == FIELDS


def test_every_field_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for group, names in FIELDS.items():
        for name in names:
            flag = f"--{group}.{name.replace('_', '-')}"
            assert flag in text
            after = re.split(rf"{flag}[ ,].*\n", text, maxsplit=1)[1].partition("--")[0]
            assert len(after.split()) > 4, f"{flag} has no explanation"


def test_demo_recipe_is_the_default() -> None:
    assert load(ROOT / "recipes" / "demo.toml") == Config()
    Config().check()


def test_recipes_are_valid() -> None:
    for path in (ROOT / "recipes").glob("*.toml"):
        load(path).check()


@given(st.integers(0, 2**40), st.floats(1e-9, 1.0), st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20))
def test_toml_round_trip(seed: int, lr: float, text: str) -> None:
    config = from_dict({"run": {"seed": seed}, "optim": {"lr": lr, "betas": [0.8, 0.9]}, "data": {"files": [text, "b"]}})
    assert from_dict(tomllib.loads(dump(config))) == config


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[optim]\nlr = 0.5\n[train]\nbatch = 64\n")
    args: Any = cli.parse(["train", str(path), "--optim.lr", "0.25", "--data.files", "x", "y", "--pipeline.layers-per-segment", "1", "3"])
    assert (args.optim.lr, args.train.batch, args.data.files, args.pipeline.layers_per_segment) == (0.25, 64, ("x", "y"), (1, 3))


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"compression": {"rank": 33}}, "compression.rank = 33"),
    ({"compression": {"rank": 0}}, "compression.rank = 0"),
    ({"compression": {"rank": -4}}, "compression.rank = -4"),
    ({"compression": {"method": "quantize"}}, "compression.wire = 'bfloat16'"),
    ({"compression": {"method": "topk", "rank": 33}}, "compression.rank = 33"),
    *(
        ({"compression": {"method": method, "wire": "int8", "init_from": "runs/a"}}, "compression.init_from = 'runs/a'")
        for method in ("none", "topk", "quantize")
    ),
    ({"compression": {"segments": 2}, "pipeline": {"stages": 3}}, "pipeline.stages = 3"),
    ({"compression": {"segments": 9}}, "compression.segments = 9"),
    ({"compression": {"segments": None}, "pipeline": {"stages": 9}}, "compression.segments = 9"),
    ({"train": {"batch": 15}}, "train.batch = 15"),
    ({"pipeline": {"stages": 8, "micro_batches": 4, "schedule": "1f1b"}}, "pipeline.micro_batches = 4"),
    ({"pipeline": {"stages": 4, "warmup": 2}}, "pipeline.warmup = 2"),
    ({"pipeline": {"layers_per_segment": [1, 2]}}, "pipeline.layers_per_segment"),
    ({"pipeline": {"layers_per_segment": [1, 1, 1, 1, 1, 1, 1, 2]}}, "pipeline.layers_per_segment"),
    ({"pipeline": {"layers_per_segment": [1, 1, 1, 1, 1, 1, 2, 0]}}, "pipeline.layers_per_segment"),
    ({"pipeline": {"micro_batches": 0}}, "pipeline.micro_batches = 0"),
    ({"pipeline": {"stages": 0}}, "pipeline.stages = 0"),
    ({"model": {"heads": 5}}, "model.heads = 5"),
    ({"model": {"heads": 32}}, "model.heads = 32"),
    ({"model": {"kv_heads": 3}}, "model.kv_heads = 3"),
    ({"model": {"width": 0}}, "model.width = 0"),
    ({"model": {"norm_eps": 0.0}}, "model.norm_eps = 0"),
    ({"model": {"preset": "small", "hf_config": "x.json"}}, "model.preset and model.hf_config"),
    ({"model": {"hf_config": "nowhere.json"}}, "model.hf_config = 'nowhere.json'"),
    ({"train": {"steps": 0}}, "train.steps = 0"),
    ({"train": {"keep_last": 0}}, "train.keep_last = 0"),
    ({"optim": {"lr": 0.0}}, "optim.lr = 0"),
    ({"optim": {"betas": [0.9, 1.0]}}, "optim.betas"),
    ({"optim": {"clip": -1.0}}, "optim.clip"),
    ({"data": {"files": ["a"], "dataset": "b"}}, "data.files and data.dataset"),
    ({"data": {"vocab": 100}}, "data.vocab = 100"),
    ({"data": {"validation": 0.0}}, "data.validation = 0"),
    ({"compression": {"static_scale": 0.0}}, "compression.static_scale"),
    ({"compression": {"move_step": 0.7}}, "compression.move_step = 0.7"),
    ({"network": {"timeout": 0.0}}, "network.timeout"),
    ({"network": {"nodes": 2}}, "network.nodes = 2 needs network.rdzv"),
    ({"network": {"rdzv": "10.0.0.1"}}, "network.rdzv = '10.0.0.1' is not HOST:PORT"),
    ({"network": {"rdzv": "h:1", "nodes": 3}}, "pipeline.stages = 1 can't be shared equally by network.nodes = 3"),
    ({"network": {"rdzv": "h:1", "nodes": 1, "node_rank": 1}}, "network.node_rank = 1"),
    ({"compression": {"stage_table": -1}}, "compression.stage_table = -1"),
    ({"compression": {"local_loss": 0.3}}, "compression.local_loss = 0.3 needs the segments' tables"),
    ({"compression": {"local_loss": -1.0}}, "compression.local_loss = -1"),
    ({"compression": {"stage_table": "half"}}, "compression.stage_table = 'half'"),
    ({"run": {"name": "a/b"}}, "run.name"),
    ({"pipeline": {"replicas": 3}}, "train.batch = 16 is not divisible by pipeline.replicas = 3"),
    ({"pipeline": {"replicas": 2, "micro_batches": 16}}, "train.batch = 16 / pipeline.replicas = 2 is not divisible by pipeline.micro"),
    ({"pipeline": {"replicas": 2}, "network": {"rdzv": "h:1"}}, "pipeline.replicas = 2 over several machines needs network.replica"),
    ({"pipeline": {"replicas": 2}, "network": {"rdzv": "h:1", "replica": 2}}, "network.replica = 2 must be from 0"),
    ({"network": {"replica": 0}}, "network.replica needs network.rdzv"),
    ({"average": {"every": 7}, "compression": {"move_every": 10}}, "compression.move_every = 10 is no multiple of average.every = 7"),
    ({"average": {"wire": "int8"}}, "average.wire"),
    ({"average": {"rank": 2, "every": 5}, "compression": {"move_every": 0}}, "average.rank = 2 and average.every = 5"),
    ({"average": {"every": 5, "outer_lr": 0.0}, "compression": {"move_every": 0}}, "average.outer_lr = 0.0"),
    ({"pipeline": {"replicas": 2}, "train": {"roll_back_above": 2.0}}, "train.roll_back_above and pipeline.replicas"),
]


@pytest.mark.parametrize(("groups", "named"), MISTAKES)
def test_what_cannot_work_is_one_line_that_names_the_field(groups: dict[str, Any], named: str) -> None:
    values = tiny(**groups)
    values = {group: {key: value for key, value in fields.items() if value is not None} for group, fields in values.items()}
    with pytest.raises(ThinpipeError) as error:
        from_dict(values).check()
    assert str(error.value).startswith(named) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[optim]\nlearning_rate = 1", "optim.learning_rate"),
        ("[optimizer]\nlr = 1", "[optimizer]"),
        ("[optim]\nlr = 'fast'", "optim.lr = 'fast'"),
        ("[train]\nsteps = 1.5", "train.steps = 1.5"),
        ("[train]\nsteps = true", "train.steps = True"),
        ("[optim]\nlr = nan", "optim.lr = nan"),
        ("[optim]\nbetas = [0.9]", "optim.betas = [0.9]"),
        ("[model]\ntied = 1", "model.tied = 1"),
        ("[pipeline]\nschedule = 'zigzag'", "pipeline.schedule = 'zigzag'"),
        ("[pipeline]\nlayers_per_segment = ['a']", "pipeline.layers_per_segment"),
        ("[data]\nfiles = 'a.txt'", "data.files = 'a.txt'"),
        ("steps = 3", "steps"),
        ("[train\n", "not valid TOML"),
        ("a = 1\na = 2", "not valid TOML"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ThinpipeError) as error:
        load(path)
    assert named in str(error.value) and str(path) in str(error.value)
    assert len(str(error.value).splitlines()) <= 2


@given(st.binary(max_size=60))
def test_any_bytes_are_a_config_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "c.toml"
    path.write_bytes(content)
    with contextlib.suppress(ThinpipeError):
        load(path)


def test_missing_file() -> None:
    with pytest.raises(ThinpipeError, match=r"nowhere\.toml"):
        load("nowhere.toml")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["train", "--optim.lrr", "3"], "--optim.lrr"),
        (["train", "--optim.lr", "x"], "--optim.lr"),
        (["train", "--pipeline.schedule", "zigzag"], "--pipeline.schedule"),
        (["train", "--pipeline.stages"], "--pipeline.stages"),
        (["train", "nowhere.toml"], "nowhere.toml"),
        (["train", "--train.batch", "15"], "train.batch = 15"),
        (["trian"], "trian"),
        (["eval"], "run"),
        (["plan", "--link", "80mbit"], "--link"),
        (["plan", "--plan.gpu", "abacus"], "abacus"),
        (["generate", "nowhere", "-p", ""], "prompt"),
        (["export", "nowhere", "out"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
        (["eval", "nowhere"], "nowhere"),
        (["verify", "--compression.rank", "0"], "compression.rank = 0"),
    ],
)
def test_bad_command_lines(argv: list[str], named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    printed = capsys.readouterr().err
    assert stop.value.code == 2
    assert named.lower() in printed.lower() and len(printed.strip().splitlines()) <= 2, printed
    assert "Traceback" not in printed
    assert not list(tmp_path.iterdir()), "a mistake leaves no folder behind"


def test_segments_and_layers() -> None:
    config = from_dict(tiny(compression={"segments": 3}, pipeline={"stages": 2})).check()
    assert config.layers_of_segments == [range(3), range(3, 6), range(6, 8)]
    assert [list(config.segments_of_stage(s, 2)) for s in (0, 1)] == [[0], [1, 2]]
    uneven = from_dict(tiny(compression={"segments": 2}, pipeline={"layers_per_segment": [6, 2]})).check()
    assert uneven.layers_of_segments == [range(6), range(6, 8)]


def test_vocab_may_only_grow() -> None:
    config = from_dict(tiny(model={"vocab": 400}))
    assert config.spec(300).vocab == 400
    with pytest.raises(ThinpipeError, match=r"model\.vocab = 400"):
        config.spec(401)


def test_presets_are_valid() -> None:
    for name in PRESETS:
        from_dict({"model": {"preset": name}}).check().spec(32_000)
