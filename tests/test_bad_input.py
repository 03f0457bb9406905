"""Bad input of every kind ends in one or two lines that name the field or file and the remedy, status 2, and costs no file.

Each case is a function of an empty folder (also the working directory) that makes the bad input and returns the command line, or
a function to call inside a command. Kinds that other files already hold are not here again: values out of range and mistyped fields
(test_config.py), text, token files and datasets at large (test_data.py), damaged checkpoints beside whole ones (test_checkpoint.py),
foreign folders and targets of an export (test_export.py), malformed links (net/test_lab.py), folders that are no run (test_report.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from thinpipe import checkpoint, cli
from thinpipe.config import ModelSpec, ThinpipeError, dump, from_dict, load
from thinpipe.data import prepare
from thinpipe.export import llama_config, read_llama_folder, to_llama
from thinpipe.generate import pick
from thinpipe.lab import Link, parse_links
from thinpipe.metrics import Metrics, read_events
from thinpipe.model import build_stages
from thinpipe.run import finished, open_run
from thinpipe.sizes import read_hf_config
from thinpipe.topology import connect
from thinpipe.trainer import Trainer

pytestmark = pytest.mark.timeout(60)

Act = list[str] | Callable[[], Any]
Make = Callable[[Path], Act]
DEEP = b"[" * 100_000
quick = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, links not followed."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def told(act: Act, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status of the command, and what it wrote to stderr."""
    if not isinstance(act, list):
        called = act
        monkeypatch.setitem(cli.COMMANDS, "case", (cli.Output, lambda args: (called(), None)[1]))
        act = ["case"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(act)
    assert isinstance(stop.value.code, int)
    return stop.value.code, capsys.readouterr().err


def expect_refusal(status: int, err: str, says: str) -> None:
    """What went before the error, such as the checkpoints that were passed over, may have lines of its own."""
    error = err[err.find("thinpipe: ") :].strip()
    assert status == 2, err
    assert 1 <= len(error.splitlines()) <= 2 and len(error) < 2000, err
    assert "Traceback" not in err and "mistake of thinpipe" not in err
    assert re.search(says, error, re.DOTALL), error


@pytest.fixture
def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Make, str], None]:
    def check(make: Make, says: str) -> None:
        act = make(folder)
        before = contents(folder)
        expect_refusal(*told(act, monkeypatch, capsys), says)
        after = contents(folder)
        assert {path: digest for path, digest in after.items() if path in before} == before

    return check


Refused = Callable[[Make, str], None]


def cases(table: dict[str, tuple[Make, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("make", "says"), table.values(), ids=table.keys())


def words(text: str) -> Make:
    return lambda folder: text.split()


def link_to_itself(path: Path) -> Path:
    path.symlink_to(path.name)
    return path


def put(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- configs ----------------------------------------------------------------------------------------------------------------------------


def toml(content: bytes | str) -> Make:
    return lambda folder: ["plan", str(put(folder / "c.toml", content))]


CONFIGS: dict[str, tuple[Make, str]] = {
    "empty": (toml(""), r"c\.toml is empty; write"),
    "blank": (toml("\n \n"), r"c\.toml is empty"),
    "UTF-16": (toml("[train]\n".encode("utf-16")), r"c\.toml is not valid TOML.*utf-8"),
    "Latin-1": (toml("[run]\nname = 'é'".encode("latin-1")), r"c\.toml is not valid TOML.*utf-8"),
    "NUL bytes": (toml(bytes(4096)), r"c\.toml is not valid TOML"),
    "cut": (toml("[run]\nname = 'de"), r"c\.toml is not valid TOML"),
    "a folder": (lambda folder: ["plan", str(folder)], "Is a directory; give the path of a TOML config"),
    "a link to itself": (lambda folder: ["plan", str(link_to_itself(folder / "c.toml"))], r"c\.toml: Too many levels"),
    "too long a name": (words("plan " + "x" * 300), "File name too long; give"),
    "no name": (lambda folder: ["plan", ""], "Is a directory; give the path"),
    "too deep": (toml(b"a = " + DEEP), r"c\.toml is not valid TOML"),
    "a table twice": (toml("[train]\nsteps = 3\n[train]\nbatch = 4\n"), r"c\.toml is not valid TOML.*line 3"),
    "a key twice, dotted": (toml("train.steps = 3\n[train]\nsteps = 4"), r"c\.toml is not valid TOML"),
    "an array of tables": (toml("[[train]]\nsteps = 3"), r"c\.toml: train must be a table; write \[train\]"),
    "a table for a field": (toml("[train.steps]\na = 3"), r"train\.steps = .* give a whole number"),
    "a date": (toml("[train]\nsteps = 2026-01-01"), r"train\.steps = .* give a whole number"),
    "thousands of digits": (toml("[train]\nsteps = " + "9" * 5000), r"c\.toml is not valid TOML"),
    "thousands of hexadecimal digits": (toml("[train]\nsteps = 0x" + "f" * 5000), r"train\.steps = .* give a whole number"),
    "above 64 bits": (toml("[train]\nsteps = 9223372036854775808"), r"train\.steps = 9223372036854775808 .* give a whole number"),
    "above all floats": (toml("[optim]\nlr = 1" + "0" * 400), r"optim\.lr = 10.* give a finite number"),
    "infinite": (toml("[optim]\nclip = inf"), r"optim\.clip = inf .* give a finite number"),
    "a long list": (toml("[data]\nfiles = [" + "1," * 100_000 + "]"), r"data\.files = \[1, .* give a list of a string"),
    "NUL in a name": (toml('[data]\ntokenizer = "a\\u0000b"'), r"data\.tokenizer = 'a\\x00b'.* give a string"),
    "NUL in a list": (toml('[data]\nfiles = ["a\\u0000b"]'), r"data\.files = .*a\\x00b.* give a list of a string"),
    "no group's name": (toml('"" = 1'), r"unknown group \[\]"),
    "half a pair": (toml("[optim]\nbetas = [0.9, 'x']"), r"optim\.betas = \[0\.9, 'x'\]"),
    "layers without end": (toml("[model]\nlayers = 1000000000000"), r"model\.layers = 1000000000000 .* at most"),
    "micro-batches without end": (toml("[pipeline]\nmicro_batches = 1000000000000"), r"micro_batches = 1000000000000; 16 micro-batches"),
    "a batch without end": (toml("[train]\nbatch = 1000000000000"), r"train\.batch = 1000000000000 .* at most"),
    "two dots in an address": (toml("[network]\nrdzv = '10..0.1:29400'"), r"network\.rdzv = '10\.\.0\.1:29400' is not HOST:PORT"),
    "a port too high": (toml("[network]\nrdzv = 'host:99999'"), r"network\.rdzv = 'host:99999' is not HOST:PORT"),
    "no address": (toml("[network]\nrdzv = 'host:1'\naddr = '10..0.1'"), r"network\.addr = '10\.\.0\.1'"),
    "fewer spares than machines": (toml("[network]\nnodes = '5:4'"), r"network\.nodes = '5:4' is no number of machines"),
    "machines in words": (toml("[network]\nnodes = 'four'"), r"network\.nodes = 'four' is no number of machines"),
    "no patience": (toml("[network]\npatience = -1"), r"network\.patience = -1.* above 0"),
    "nothing to train on": (toml("[data]\nvalidation = 1"), r"data\.validation = 1\.0 must be between"),
    "a model from two sources": (toml("[model]\npreset = 'small'\ninit_from = 'x'"), r"model\.preset and model\.init_from are both"),
    "a run to begin with that is none": (
        lambda folder: ["train", str(put(folder / "c.toml", "[compression]\ninit_from = 'x'"))],
        r"compression\.init_from = 'x' holds no run",
    ),
}  # fmt: skip


@cases(CONFIGS)
def test_configs(make: Make, says: str, refused: Refused) -> None:
    refused(make, says)


def test_the_mark_that_some_editors_put_first_is_no_mistake(folder: Path) -> None:
    assert load(put(folder / "c.toml", b"\xef\xbb\xbf[train]\nsteps = 3")).train.steps == 3


# --- command lines ----------------------------------------------------------------------------------------------------------------------


def race(more: str) -> Make:
    """With a.toml and b.toml."""

    def make(folder: Path) -> Act:
        for name in "ab":
            put(folder / f"{name}.toml", "[run]\nname = 'x'")
        return f"race {more}".split()

    return make


COMMAND_LINES: dict[str, tuple[Make, str]] = {
    "no such command": (lambda folder: [""], "unknown command ''; commands are train"),
    "an option for a command": (words("--train.steps 3"), "unknown command '--train.steps'; commands are"),
    "a group without a field": (words("plan --optim 3"), r"--optim.*see thinpipe plan --help"),
    "half a name": (words("plan --optim.l 3"), r"--optim\.l.*see thinpipe plan --help"),
    "a short option": (words("plan -x"), "-x.*see thinpipe plan --help"),
    "a word too many": (words("eval run more"), "more.*see thinpipe eval --help"),
    "a word too few": (words("export run"), "Folder to write.*see thinpipe export --help"),
    "two configs": (lambda folder: ["plan", str(put(folder / "c.toml", "[run]")), "d.toml"], r"d\.toml.*see thinpipe plan"),
    "nothing after the equals sign": (words("plan --optim.lr="), r"--optim\.lr"),
    "an option for a value": (words("plan --train.batch --optim.lr 3"), r"--train\.batch"),
    "an option for a prompt": (words("generate run -p --staged"), "-p.*see thinpipe generate"),
    "given twice": (words("plan --train.steps 3 --train.steps 4"), r"--train\.steps is given twice; keep one"),
    "given twice, spelled twice": (words("plan --train.eval-every=3 --train.eval_every 4"), r"--train\.eval.every is given twice"),
    "a list given twice": (words("plan --data.files a --data.files b"), r"--data\.files is given twice"),
    "no number": (lambda folder: ["plan", "--train.steps", ""], r"--train\.steps"),
    "scientific": (words("plan --train.steps 1e3"), r"--train\.steps"),
    "a number above 64 bits": (words(f"plan --train.steps {10**30}"), r"train\.steps = 10+ .* give a whole number"),
    "no finite number": (words("plan --optim.weight-decay nan"), r"optim\.weight_decay = nan .* give a finite number"),
    "an infinite number": (words("plan --model.rope-theta inf"), r"model\.rope_theta = inf .* give a finite number"),
    "neither yes nor no": (words("plan --model.tied maybe"), r"--model\.tied"),
    "not UTF-8": (lambda folder: ["plan", "--run.name", "caf\udce9"], r"'caf\\udce9' is not UTF-8; "),
    "a NUL byte": (lambda folder: ["plan", "--run.dir", "a\0b"], r"run\.dir = 'a\\x00b'"),
    "a folder with too long a name": (words(f"train --run.dir {'x' * 300}"), r"x/config\.toml: File name too long; "),
    "a name too long for a folder": (words(f"train --run.name {'x' * 300}"), r"run\.name = 'x+' can't be used: File name too long; give"),
    "a field with a slip": (words("train --compression.rnk 4"), r"rnk, 4; perhaps you meant --compression\.rank or"),
    "a config behind the options": (words("train --train.steps 3 my.toml"), r"my\.toml; a CONFIG\.toml goes before the options"),
    "an unknown device": (words("train --run.device tpu"), r"--run\.device"),
    "the timeline's folder is missing": (words("plan --timeline no/such/folder.png"), "no/such/folder.png: No such file"),
    "probe alone": (words("probe"), "network.rdzv HOST:PORT"),
    "probe without others": (words("probe --network.rdzv h:1 --network.nodes 1"), r"network\.nodes N, 2 at least"),
    "race without configs": (words("race --seeds 2"), "race needs the configs"),
    "race with a missing config": (race("a.toml c.toml"), r"c\.toml: No such file"),
    "race against itself": (race("a.toml a.toml"), "same file name; rename one"),
    "race without seeds": (race("a.toml b.toml --seeds 0"), "--seeds 0 .* at least 1"),
    "race to no loss": (race("a.toml b.toml --target nan"), "--target nan"),
    "race with two links for all": (race("a.toml b.toml --link 1mbit,1ms 2mbit,1ms"), "give one link for all"),
    "race with a stranger's link": (race("a.toml b.toml --link c.toml=1mbit,1ms"), r"--link names c\.toml, which is not in the race"),
    "race with a bad link for one": (race("a.toml b.toml --link b.toml=fast"), "--link or plan.link of b 'fast' has no delay"),
    "race into a file": (race("a.toml b.toml --timing planner --out a.toml"), r"a\.toml.* can't be used"),
    "no temperature": (words("generate run -p x --temperature -1"), "--temperature -1.0 must be 0 or above"),
    "a temperature that is no number": (words("generate run -p x --temperature nan"), "--temperature nan must be 0 or above"),
    "no probability": (words("generate run -p x --top-p 1.5"), r"--top-p 1\.5 must be in"),
    "nothing to write": (words("generate run -p x --new-tokens 0"), "--new-tokens 0 is too small"),
    "a seed above 64 bits": (words(f"generate run -p x --seed {10**30}"), "--seed = 10+ .* give a whole number"),
    "stages without --staged": (words("generate run -p x --stages 2"), "--stages 2 goes with --staged"),
    "no stages": (words("generate run -p x --staged --stages 0"), "--stages 0 goes with --staged and is at least 1"),
    "report without runs": (words("report"), "runs|no run given"),
}  # fmt: skip


@cases(COMMAND_LINES)
def test_command_lines(make: Make, says: str, refused: Refused) -> None:
    refused(make, says)


LINKS = {
    "80mbit 25ms": "no delay|not a number",
    "80mbit;25ms": "no delay|not a number",
    "fast,25ms": "'fast' is not a number with gbit",
    "80mbit,-25ms": "'-25ms' is not a number with s",
    "1e3mbit,25ms": "'1e3mbit' is not a number",
    "80mbit,25ms,loss=-1%": "loss '-1%' is not a number with %",
    "80mbit,25ms,loss=": "loss '' is not a number",
    "80mbit,25ms,jitter=nan": "jitter 'nan' is not a number",
    "80mbit,25ms,jitter=9999gbit": "jitter = 9999gbit can't be",
    "80mbit,25ms,up=": "up '' is not a number",
    "80mbit,25ms,=3": "= is unknown",
    "80mbit,25ms,cc=": "cc = '' names no TCP",
    "80mbit,25ms/": "empty part",
    "/": "empty part",
    "80mbit,25ms/80mbit,25ms": "2 links for 3 boundaries; give one for all, or 3",
    "80mbit,25ms,rate=3mbit": "rate is given twice",
    "unlimited,unlimited": "delay 'unlimited' is not a number",
    "9" * 400 + "gbit,25ms": "is out of range; use 1kbit to 1000gbit",
}


@pytest.mark.parametrize(("text", "says"), LINKS.items(), ids=[text[:30] for text in LINKS])
def test_links(text: str, says: str, refused: Refused) -> None:
    refused(lambda folder: lambda: parse_links(text, 3), f"^thinpipe: --link.*({says})")


@pytest.mark.parametrize(("argv", "name"), [(["plan", "--link", "fast"], "--link"), (["lab", "--plan.link", "fast"], r"plan\.link")])
def test_a_bad_link_is_named_as_it_was_given(argv: list[str], name: str, refused: Refused) -> None:
    refused(lambda folder: argv, f"{name} 'fast' has no delay; write RATE,DELAY")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_links_of_python(value: float) -> None:
    for field in ("up", "delay", "loss", "jitter"):
        with pytest.raises(ThinpipeError, match=f"^link: {field}"):
            Link(**{"up": 1e6, field: value})  # type: ignore[arg-type]


def test_a_temperature_next_to_nothing_takes_the_likeliest() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert pick(logits, 1e-320, 1.0, torch.Generator().manual_seed(0)).tolist() == [1]


# --- data -------------------------------------------------------------------------------------------------------------------------------


def preparing(folder: Path, *files: str, **data: Any) -> Act:
    """`prepare` on files of the folder."""
    fields = {"vocab": 300, "validation": 0.2, "cache": str(folder / "c"), "files": [str(folder / name) for name in files]} | data
    vocab = fields.pop("model_vocab", None)
    model = {"context": 8} | ({"vocab": vocab} if vocab else {})
    return lambda: prepare(from_dict({"model": model, "data": fields}).check())


def write_texts(folder: Path) -> None:
    for i in range(6):
        put(folder / f"{i}.txt", f"document {i} of many words, " * 9)


def tokenizer(content: bytes | str | None, path: str = "t.json") -> Make:
    """Six texts and a tokenizer of that content."""

    def make(folder: Path) -> Act:
        write_texts(folder)
        if content is not None:
            put(folder / path, content)
        return preparing(folder, "*.txt", tokenizer=str(folder / path) if content is not None else path)

    return make


def file(name: str, content: bytes | str | Callable[[Path], Any], **data: Any) -> Make:
    def make(folder: Path) -> Act:
        if callable(content):
            content(folder / name)
        else:
            put(folder / name, content)
        return preparing(folder, name, **data)

    return make


def word_level(**vocab: int) -> str:
    return Tokenizer(models.WordLevel(vocab, unk_token="[UNK]")).to_str()


def speed_run(magic: int, version: int, count: int, ids: int = 40, width: int = 2) -> bytes:
    return np.array([magic, version, count] + [0] * 253, "<i4").tobytes() + bytes(ids * width)


def npy(shape: str = "(9,)", descr: str = "'<i8'", data: bytes = bytes(72), version: bytes = b"\x01\x00") -> bytes:
    """A .npy file with a header of one's own."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header + data


def a_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", npy())


def parquet(harm: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({"text": [f"row {i}" for i in range(50)]}), path)
        path.write_bytes(harm(path.read_bytes()))

    return make


WHOLE = "not a whole .npy file of a one-dimensional array of integers; write the ids with numpy.save"
NOT_TOKENIZER = r"data\.tokenizer: \S*t\.json is not a tokenizer\.json"
DATA: dict[str, tuple[Make, str]] = {
    "tokenizer: empty": (tokenizer(""), NOT_TOKENIZER),
    "tokenizer: a list": (tokenizer("[1, 2]"), NOT_TOKENIZER),
    "tokenizer: a number": (tokenizer("3"), NOT_TOKENIZER),
    "tokenizer: cut": (tokenizer(word_level(a=0, b=1)[:-30]), NOT_TOKENIZER),
    "tokenizer: UTF-16": (tokenizer(word_level(a=0).encode("utf-16")), NOT_TOKENIZER),
    "tokenizer: too deep": (tokenizer(DEEP), NOT_TOKENIZER),
    "tokenizer: ids are text": (tokenizer(word_level(a=0).replace('"a":0', '"a":"x"')), NOT_TOKENIZER),
    "tokenizer: ids below 0": (tokenizer(word_level(a=0).replace('"a":0', '"a":-1')), NOT_TOKENIZER),
    "tokenizer: no vocabulary": (tokenizer(Tokenizer(models.BPE()).to_str()), r"t\.json has no vocabulary"),
    "tokenizer: ids with a hole of billions": (tokenizer(word_level(a=0, b=2**31)), r"t\.json.* 2147483648.*embedding"),
    "tokenizer: a word without an entry": (tokenizer(word_level(a=0, b=1)), r"data\.files can't be encoded .*UNK.*; set another"),
    "tokenizer: a folder": (tokenizer(None, "/"), r"data\.tokenizer: /: Is a directory; give"),
    "tokenizer: nobody's home": (tokenizer(None, "~nobody-at-all/t.json"), r"data\.tokenizer: ~nobody-at-all/t\.json: No such file"),
    "cache: nobody's home": (file("a.txt", "a b " * 99, cache="~nobody-at-all/c"), r"data\.cache.*name"),
    "cache: a file on the way": (
        lambda folder: (put(folder / "c", ""), write_texts(folder), preparing(folder, "*.txt", cache=str(folder / "c/d")))[-1],
        r"data\.cache: .*Not a directory; name a folder",
    ),
    ".bin: Llama's wrong version": (file("a.bin", speed_run(20240801, 1, 40, width=4)), r"a\.bin: .* version 7; write the file again"),
    ".bin: a count below 0": (file("a.bin", speed_run(20240520, 1, -1)), r"a\.bin: header counts -1 tokens, but 40 follow"),
    ".bin: a header only": (file("a.bin", speed_run(20240520, 1, 40, ids=0)), r"a\.bin: header counts 40 tokens, but 0 follow"),
    ".bin: the magic only": (file("a.bin", speed_run(20240520, 1, 40)[:4]), r"a\.bin: speed-run header is not 256 numbers"),
    ".bin: odd for 32 bits": (file("a.bin", bytes(42), dtype="uint32"), r"42 bytes are not whole uint32 ids; set data\.dtype"),
    ".bin: ids of another width": (
        file("a.bin", np.arange(300, 400, dtype="<u2").tobytes(), dtype="uint32"),
        r"a\.bin: token 0 has id 19726636, outside .*data\.dtype",
    ),
    ".bin: another format's magic": (file("a.bin", speed_run(20990101, 1, 40), model_vocab=256), r"a\.bin: token 0 has id .*model\.vocab"),
    ".bin: a folder": (file("a.bin", lambda path: path.mkdir()), r"data\.files: .*a\.bin' matches no file"),
    ".npy: objects": (file("a.npy", lambda path: np.save(path, np.array([1, "x"], object), allow_pickle=True)), WHOLE),
    ".npy: a pickle": (file("a.npy", b"cos\nsystem\n(S'false'\ntR."), WHOLE),
    ".npy: booleans": (file("a.npy", lambda path: np.save(path, np.zeros(99, bool))), WHOLE),
    ".npy: a single number": (file("a.npy", lambda path: np.save(path, np.array(3))), WHOLE),
    ".npy: records": (file("a.npy", lambda path: np.save(path, np.zeros(9, "i4,i4"))), WHOLE),
    ".npy: more than memory": (file("a.npy", npy(shape=f"({2**70},)")), WHOLE),
    ".npy: a length below 0": (file("a.npy", npy(shape="(-9,)")), WHOLE),
    ".npy: no such type": (file("a.npy", npy(descr="'<q9'")), WHOLE),
    ".npy: a header that is no literal": (file("a.npy", npy(shape="(9 9)")), WHOLE),
    ".npy: a newer version": (file("a.npy", npy(version=b"\x09\x00")), WHOLE),
    ".npy: cut in its data": (file("a.npy", npy(data=bytes(71))), WHOLE),
    ".npy: a zip": (file("a.npy", a_zip), WHOLE),
    ".npy: half a zip": (file("a.npy", b"PK\x03\x04 and no more"), WHOLE),
    "text: UTF-16": (file("a.txt", "text " .encode("utf-16") * 99), r"a\.txt: byte 0 is not UTF-8; convert"),
    "text: wrong at the end of a line of megabytes": (file("a.txt", b"x" * 3_000_000 + b"\xff"), r"a\.txt: byte 3000000 is not UTF-8"),
    "text: one of NUL bytes": (file("a.txt", bytes(99)), "one document only"),
    "text: a folder": (lambda folder: preparing(folder, "."), r"data\.files: .* matches no file; give files"),
    "text: a link to itself": (file("a.txt", link_to_itself), r"data\.files: .*a\.txt' matches no file"),
    "text: an open bracket": (lambda folder: preparing(folder, "[a"), r"data\.files: .*\[a' matches no file"),
    "JSON lines: NUL bytes": (file("a.jsonl", b'{"text": "a"}\n' + bytes(20)), r"a\.jsonl:2: no JSON object with text in 'text'"),
    "JSON lines: too deep": (file("a.jsonl", b'{"text": "a"}\n' + DEEP), r"a\.jsonl:2: no JSON object"),
    "JSON lines: a line of megabytes": (file("a.jsonl", b'{"text": "' + b"x" * 3_000_000), r"a\.jsonl:1: no JSON object"),
    "JSON lines: thousands of digits": (file("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}"), r"a\.jsonl:1: no JSON object"),
    "JSON lines: blank": (file("a.jsonl", "\n \n\n"), "holds no text"),
    "JSON lines: another field": (file("a.jsonl", '{"text": "a"}\n' * 9, field="body"), r"a\.jsonl:1: .*'body'; .*data\.field"),
    "parquet: empty": (file("a.parquet", b""), r"a\.parquet can't be read"),
    "parquet: cut": (file("a.parquet", parquet(lambda whole: whole[:-20])), r"a\.parquet can't be read"),
    "parquet: damaged columns": (file("a.parquet", parquet(lambda whole: whole[:4] + b"\xff" * 60 + whole[64:])), r"a\.parquet can't"),
}  # fmt: skip


@cases(DATA)
def test_data(make: Make, says: str, refused: Refused) -> None:
    refused(make, says)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.npy", "a.bin"])
def test_data_that_may_not_be_read(name: str, refused: Refused) -> None:
    refused(file(name, lambda path: put(path, "x" * 99).chmod(0)), rf"{name} can't be read: Permission denied")


# --- checkpoints and run folders --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    base = tmp_path_factory.mktemp("trained")
    (base / "texts").mkdir()
    write_texts(base / "texts")
    data = {"files": [str(base / "texts" / "*.txt")], "vocab": 300, "cache": str(base / "cache"), "validation": 0.3}
    model = {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "hidden": 32, "context": 16}
    groups = {"model": model, "compression": {"rank": 8, "segments": 2}, "train": {"steps": 2, "batch": 8, "eval_every": 0}}
    config, folder, _ = open_run(from_dict(tiny(data=data, run={"dir": str(base / "run")}, **groups)))
    with connect(30) as alone:
        Trainer(config, alone, folder).fit()
    torch.set_num_threads(1)
    return folder


def seal(path: Path, **changes: Any) -> None:
    """Change a manifest and give it the hash that goes with it."""
    content = json.loads(path.read_text()) | changes
    content.pop("sha256")
    path.write_text(json.dumps(content | {"sha256": checkpoint._digest(content)}))


def seal_file(run: Path, act: Callable[[Path], None]) -> None:
    """Change the stage's file and have the manifest agree to it."""
    (path,) = run.glob("checkpoints/*/*.safetensors")
    act(path)
    (record,) = json.loads((path.parent / "manifest.json").read_text())["files"].values()
    record |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
    seal(path.parent / "manifest.json", files={path.name: record})


def reshape(path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(path)
    save_file(tensors | {"model/norm.weight": change(tensors["model/norm.weight"])}, path)


def edit(**fields: Any) -> Callable[[Path], None]:
    """GROUP__FIELD = value in the run's config.toml."""

    def act(run: Path) -> None:
        config = load(run / "config.toml")
        for name, value in fields.items():
            group, _, field = name.partition("__")
            config = replace(config, **{group: replace(getattr(config, group), **{field: value})})
        put(run / "config.toml", dump(config))

    return act


def manifest(**changes: Any) -> Callable[[Path], None]:
    return lambda run: seal(run / "checkpoints/step-00000002/manifest.json", **changes)


def record(**changes: Any) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        path = run / "checkpoints/step-00000002/manifest.json"
        files = json.loads(path.read_text())["files"]
        seal(path, files={name: entry | changes for name, entry in files.items()})

    return act


def replaced(name: str, by: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Something else in the place of that file or folder."""

    def act(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        by(path)

    return act


def without_facts(*names: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        path = run / "checkpoints/step-00000002/manifest.json"
        facts = json.loads(path.read_text())["facts"]
        seal(path, facts={name: value for name, value in facts.items() if name not in names})

    return act


STEP, STAGE = "checkpoints/step-00000002", "checkpoints/step-00000002/stage-0-of-1.safetensors"
NOT_WHOLE = r"no whole checkpoint in run/checkpoints; the newest: \S*"
PUT_BACK = r"in run/config\.toml.*; put it back"
RUNS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a link to itself for a checkpoint": (replaced(STEP, link_to_itself), "eval run", NOT_WHOLE + "manifest.json.*Too many levels"),
    "a link to itself for a manifest": (replaced(f"{STEP}/manifest.json", link_to_itself), "eval run", NOT_WHOLE + ".*Too many levels"),
    "a link to itself for a file": (replaced(STAGE, link_to_itself), "eval run", NOT_WHOLE + "stage-0.*Too many levels"),
    "a file for all checkpoints": (replaced("checkpoints", lambda path: put(path, "")), "eval run", "run has no checkpoint yet; train"),
    "sealed: a size beyond all disks": (record(bytes=10**30), "eval run", NOT_WHOLE + r"stage-0.*bytes instead of 10+;.*\nRestore"),
    "sealed: a size that is none": (record(bytes="many"), "eval run", NOT_WHOLE + "manifest.json .* is no manifest"),
    "sealed: no tensors": (record(tensors={}), "eval run", "step-00000002 has no tensor basis/U"),
    "sealed: tensors in a list": (record(tensors=["a"]), "eval run", NOT_WHOLE + "manifest.json .* is no manifest"),
    "sealed: facts of nothing": (manifest(facts={}), "eval run", r"step-00000002/manifest\.json.*vocab"),
    "sealed: a vocabulary in words": (without_facts("vocab"), "generate run -p x", r"step-00000002/manifest\.json.*vocab"),
    "sealed: no config": (without_facts("config"), "export run out", r"step-00000002/manifest\.json.*config"),
    "sealed: another shape": (
        lambda run: seal_file(run, lambda path: reshape(path, lambda t: t[:-1].clone())), "eval run", r"model/norm\.weight .*\[15\].*\[16\]"
    ),
    "sealed: another type": (
        lambda run: seal_file(run, lambda path: reshape(path, lambda t: t.to(torch.int32))), "eval run", r"model/norm\.weight .*int32"
    ),
    "sealed: a header without end": (
        lambda run: seal_file(run, lambda path: put(path, b"\xff" * 7 + b"\x7f" + path.read_bytes()[8:])),
        "eval run", r"stage-0-of-1\.safetensors can't be read: .*; copy it again",
    ),
    "sealed: a header that is no JSON": (
        lambda run: seal_file(run, lambda path: put(path, b"\x09" + bytes(7) + b"{not JSON" + bytes(99))),
        "generate run -p x", r"stage-0-of-1\.safetensors can't be read: .*; copy it again",
    ),
    "config.toml: empty": (lambda run: put(run / "config.toml", ""), "eval run", r"run/config\.toml is empty"),
    "config.toml: cut": (lambda run: put(run / "config.toml", (run / "config.toml").read_bytes()[:-5]), "eval run", r"run/config\.toml"),
    "config.toml: a folder": (replaced("config.toml", lambda path: path.mkdir()), "generate run -p x", r"holds no run \(no config\.toml\)"),
    "config.toml: of a newer thinpipe": (
        lambda run: put(run / "config.toml", "[train]\nwarp = 3"), "train --run.dir run", r"run/config\.toml: unknown field train\.warp"
    ),
    "config.toml: another hidden width": (edit(model__hidden=64), "eval run", r"model\.hidden .* 32 .*64 " + PUT_BACK),
    "config.toml: a width beyond memory": (edit(model__width=2**40), "eval run", r"model\.width .*" + PUT_BACK),
    "config.toml: another rank": (edit(compression__rank=4), "generate run -p x", r"compression\.rank .* 8 .*4 " + PUT_BACK),
    "config.toml: another base of positions": (edit(model__rope_theta=1e6), "export run out", r"model\.rope_theta .*" + PUT_BACK),
    "config.toml: rank too large": (edit(compression__rank=400), "eval run", r"compression\.rank .*" + PUT_BACK),
    "tokenizer.json: cut": (lambda run: put(run / "tokenizer.json", '{"version"'), "generate run -p x", r"run/tokenizer\.json is not a"),
    "tokenizer.json: another": (
        lambda run: put(run / "tokenizer.json", word_level(x=0, y=999)),
        "generate run -p x", r"run/tokenizer\.json has 1000 ids and .* model \d+; put back",
    ),
    "tokenizer.json: without the prompt's words": (
        lambda run: put(run / "tokenizer.json", word_level(y=0)), "generate run -p x", r"prompt.*UNK"
    ),
    "tokenizer.json: missing": (lambda run: (run / "tokenizer.json").unlink(), "generate run -p x", r"no tokenizer\.json; put it back"),
    "a prompt too long": (lambda run: None, f"generate run -p {'abc' * 99}", r"the prompt has \d+ tokens; give 1 to model\.context = 16"),
    "stages beyond the segments": (
        lambda run: None, f"generate run -p x --staged --stages {10**9}", "1000000000 stages are more than .* 2 segments"
    ),
    "batches below 0": (lambda run: None, "eval run --batches -1", "--batches -1"),
    "the corpus is gone": (edit(data__files=("gone/*.txt",)), "eval run", r"data\.files: 'gone/\*\.txt' matches no file"),
    "a file for a run": (lambda run: put(run.parent / "f", ""), "eval f", "f holds no run"),
    "a file for a run to train": (lambda run: put(run.parent / "f", ""), "train --run.dir f", r"run\.dir = 'f' can't be used: File exists"),
    "a file for the folder of runs": (
        lambda run: put(run.parent / "runs", ""), "train --run.name r", r"run\.name = 'r' can't be used: .*; give"
    ),
    "a link to nowhere for the folder of runs": (
        lambda run: (run.parent / "runs").symlink_to("nowhere"), "train --run.name r", r"run\.name = 'r' can't be used: .*; give"
    ),
    "an export into the working folder": (
        lambda run: ((run.parent / "here").mkdir(), os.chdir(run.parent / "here")), "export ../run .", r"\. is .*name a new one"
    ),
    "an export with too long a name": (lambda run: None, f"export run {'x' * 300}", "x: File name too long; "),
    "an export of a file": (lambda run: put(run.parent / "f", ""), "export f out", "f holds no run"),
    "a report into a file": (lambda run: put(run.parent / "f", ""), "report run --out f/g", "f/g can't be written"),
}  # fmt: skip


@pytest.mark.parametrize(("harm", "command", "says"), RUNS.values(), ids=RUNS.keys())
def test_runs(harm: Callable[[Path], Any], command: str, says: str, trained: Path, refused: Refused) -> None:
    def make(folder: Path) -> Act:
        harm(shutil.copytree(trained, folder / "run"))
        return command.split()

    refused(make, says)


RESULTS = ["", "{", "[1]", "null", '"x"', '{"steps": "x"}', '{"steps": null}', '{"steps": [3]}', '{"steps": 9}', "\udce9", "[" * 100_000]


@pytest.mark.parametrize("text", RESULTS, ids=range(len(RESULTS)))
def test_a_damaged_result_is_none(text: str, trained: Path, folder: Path) -> None:
    """The run then goes on from its last checkpoint, which says all over again."""
    put(folder / "result.json", text.encode(errors="surrogateescape"))
    assert finished(folder, load(trained / "config.toml")) is None


def test_damaged_metrics_cost_their_lines_only(trained: Path, folder: Path) -> None:
    """Cut in the middle of a line, of other types, too deep; what is well is kept, with separators that are no ends of lines."""
    well = [{"event": "step", "step": step, "note": "a\u2028b\x85c"} for step in (1, 2)]
    first, second = (json.dumps(event, ensure_ascii=False).encode() for event in well)
    bad = [
        b'{"event": "step", "st',
        b'{"event": "step", "step": "x"}',
        b'{"step": 3}',
        b'{"event": 3}',
        b"[3]",
        b"\xff\xfe",
        DEEP,
        bytes(9),
    ]
    path = put(folder / "metrics.jsonl", b"\n".join([first, *bad, second]))
    Metrics(path, 9, 9, quiet=True).close()
    assert list(read_events(path)) == well and len(path.read_text().split("\n")) == 3


def test_metrics_that_cannot_be_read(refused: Refused) -> None:
    refused(lambda folder: ((folder / "m").mkdir(), lambda: list(read_events(folder / "m")))[1], "m can't be read: Is a directory; ")


# --- Hugging Face folders ---------------------------------------------------------------------------------------------------------------

SPEC = ModelSpec(width=16, layers=1, heads=2, kv_heads=1, hidden=32, context=16, vocab=300, tied=False, rope_theta=1e4, norm_eps=1e-5)


@functools.cache
def llama() -> dict[str, torch.Tensor]:
    model = {name: getattr(SPEC, name) for name in ("width", "layers", "heads", "kv_heads", "hidden", "context", "tied")}
    groups = {"model": model, "compression": {"method": "none", "segments": 1}, "pipeline": {"micro_batches": 1}, "train": {"batch": 1}}
    (stage,) = build_stages(from_dict(tiny(**groups)), SPEC.vocab)
    return to_llama({name: parameter.detach() for name, parameter, _ in stage.roles()}, SPEC)


def hugging_face(folder: Path, **tensors: torch.Tensor) -> Path:
    made = folder / "hf"
    made.mkdir()
    put(made / "config.json", json.dumps(llama_config(SPEC)))
    save_file(llama() | tensors, made / "model.safetensors")
    return made


def hf_config(text: bytes | str | None = None, **fields: Any) -> Make:
    """A Hugging Face config with some fields replaced (None: left out)."""

    def make(folder: Path) -> Act:
        settings = {name: value for name, value in (llama_config(SPEC) | fields).items() if value is not None or name not in fields}
        put(folder / "c.json", json.dumps(settings) if text is None else text)
        return lambda: from_dict({"model": {"hf_config": str(folder / "c.json")}}).check()

    return make


HF_CONFIGS: dict[str, tuple[Make, str]] = {
    "not JSON": (hf_config("{"), r"c\.json' isn't JSON"),
    "empty": (hf_config(""), r"c\.json' isn't JSON"),
    "Latin-1": (hf_config(b'{"model_type": "\xe9"}'), r"c\.json' isn't JSON"),
    "a list": (hf_config("[]"), r"c\.json' isn't a JSON object; give a model's config\.json"),
    "too deep": (hf_config(DEEP), r"c\.json' isn't JSON"),
    "a folder": (lambda folder: lambda: read_hf_config(folder), r"model\.hf_config = .* can't be read: Is a directory; give"),
    "no layers": (hf_config(num_hidden_layers=0), r"c\.json: num_hidden_layers = 0 .*at least 1"),
    "heads below 0": (hf_config(num_attention_heads=-2), r"c\.json: num_attention_heads = -2 .*at least 1"),
    "no key heads": (hf_config(num_key_value_heads=0), r"c\.json: num_key_value_heads = 0 .*at least 1"),
    "no width": (hf_config(hidden_size=0, head_dim=None), r"c\.json: hidden_size = 0 .*at least 1"),
    "layers without end": (hf_config(num_hidden_layers=10**12), r"model\.layers = 10+ .*at most"),
    "a size in words": (hf_config(hidden_size="64"), r"c\.json: hidden_size = '64' .*give a whole number"),
    "a size that is a float": (hf_config(hidden_size=64.5), r"c\.json: hidden_size = 64\.5 .*give a whole number"),
    "a size above 64 bits": (hf_config(vocab_size=10**30), r"c\.json: vocab_size = 10+ .*give a whole number"),
    "an epsilon that is no number": (hf_config(rms_norm_eps=float("nan")), r"c\.json: rms_norm_eps = nan .*give a finite number"),
    "a base above all floats": (hf_config(rope_theta=10**400), r"c\.json: rope_theta = 10+ .*give a finite number"),
    "a missing field": (hf_config(num_hidden_layers=None), r"c\.json: num_hidden_layers is missing"),
    "another model": (hf_config(model_type="gpt2"), r"c\.json: model_type = 'gpt2' is not implemented"),
    "a list of types": (hf_config(model_type=["llama"]), r"c\.json: model_type = \['llama'\] is not implemented"),
    "heads of another width": (hf_config(head_dim=7), r"c\.json: head_dim = 7 is not implemented"),
    "positions in a list": (hf_config(rope_parameters=[3]), r"c\.json: rope_parameters = \[3\]"),
    "positions that scale": (hf_config(rope_parameters={"rope_type": "yarn"}), r"rope_parameters\.rope_type = 'yarn' is not implemented"),
}  # fmt: skip


@cases(HF_CONFIGS)
def test_hugging_face_configs(make: Make, says: str, refused: Refused) -> None:
    refused(make, says)


def weights(harm: Callable[[Path], Any], name: str = "model.safetensors") -> Make:
    def make(folder: Path) -> Act:
        made = hugging_face(folder)
        harm(made / name)
        return lambda: read_llama_folder(made)

    return make


def changed(name: str, tensor: torch.Tensor) -> Make:
    return lambda folder: functools.partial(read_llama_folder, hugging_face(folder, **{name: tensor}))


def header(**entry: Any) -> Callable[[Path], Any]:
    """A safetensors file whose header says that of a tensor of float32 with 64 bytes of data."""
    whole = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}
    text = json.dumps({NORM: whole | entry}).encode()
    return lambda path: put(path, len(text).to_bytes(8, "little") + text + bytes(64))


def index(text: bytes | str | Callable[[dict[str, str]], Any]) -> Make:
    """The weights in a shard, with an index of that text, or with what a function makes of the right one."""

    def make(folder: Path) -> Act:
        made = hugging_face(folder)
        (made / "model.safetensors").rename(made / "a.safetensors")
        right = dict.fromkeys(llama(), "a.safetensors")
        content = json.dumps({"weight_map": text(right)}) if callable(text) else text
        put(made / "model.safetensors.index.json", content)
        return lambda: read_llama_folder(made)

    return make


UNREADABLE = r"model\.safetensors can't be read \(.*\); copy \S*hf/model\.safetensors again"
UNUSABLE = r"hf/model\.safetensors\.index\.json can't be used \(.*\); copy the folder again"
NORM = "model.norm.weight"
IMPORTS: dict[str, tuple[Make, str]] = {
    "weights: empty": (weights(lambda path: put(path, "")), UNREADABLE),
    "weights: a header without end": (weights(lambda path: put(path, b"\xff" * 8 + path.read_bytes()[8:])), UNREADABLE),
    "weights: a header beyond the file": (weights(lambda path: put(path, (10**6).to_bytes(8, "little") + b"{}")), UNREADABLE),
    "weights: a header that is no JSON": (weights(lambda path: put(path, b"\x04" + bytes(7) + b"oops" + bytes(64))), UNREADABLE),
    "weights: cut": (weights(lambda path: put(path, path.read_bytes()[:-1])), UNREADABLE),
    "weights: no such type": (weights(header(dtype="Q8")), UNREADABLE),
    "weights: offsets backwards": (weights(header(data_offsets=[64, 0])), UNREADABLE),
    "weights: a shape beyond the data": (weights(header(shape=[2**62, 9])), UNREADABLE),
    "weights: a folder": (weights(lambda path: (path.unlink(), path.mkdir())), UNREADABLE),
    "weights: a link to itself": (weights(lambda path: (path.unlink(), link_to_itself(path))), "holds neither"),
    "weights: another shape": (changed(NORM, torch.ones(15)), r"hf: model\.norm\.weight has shape \[15\]"),
    "weights: whole numbers": (changed(NORM, torch.ones(16, dtype=torch.int32)), r"hf: model\.norm\.weight is of type int32"),
    "weights: one too many": (changed("model.layers.9.x", torch.ones(1)), r"hf: model\.layers\.9\.x is not a tensor of a plain Llama"),
    "index: not JSON": (index("{"), UNUSABLE),
    "index: a list": (index("[]"), UNUSABLE),
    "index: too deep": (index(DEEP), UNUSABLE),
    "index: without a map": (index("{}"), UNUSABLE),
    "index: a list for a map": (index(lambda right: list(right)), UNUSABLE),
    "index: numbers for files": (index(lambda right: right | {NORM: 3}), UNUSABLE),
    "index: the folder above": (index(lambda right: right | {NORM: ".."}), r"\.\. can't be read"),
    "index: a path from the root": (index(lambda right: right | {NORM: "/etc/hostname"}), UNUSABLE),
    "index: a NUL byte": (index(lambda right: right | {NORM: "a\0b"}), "can't be (used|read)"),
    "index: no name": (index(lambda right: right | {NORM: ""}), "can't be (used|read)"),
    "index: a missing shard": (index(lambda right: right | {NORM: "b.safetensors"}), r"b\.safetensors can't be read"),
    "index: a tensor that its shard has not": (index(lambda right: right | {"lm_head.bias": "a.safetensors"}), r"lm_head\.bias"),
    "index: nothing": (index(lambda right: {}), r"hf: model\.embed_tokens\.weight is missing"),
}  # fmt: skip


@cases(IMPORTS)
def test_imports(make: Make, says: str, refused: Refused) -> None:
    refused(make, says)


# --- whatever comes ---------------------------------------------------------------------------------------------------------------------

WORD = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=6)  # of one line, as the errors that name it
ODD = st.none() | st.booleans() | st.integers() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=8)
JSON = st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6)


@contextlib.contextmanager
def refusal_or_nothing() -> Iterator[None]:
    """Only ThinpipeErrors of one or two lines may come out."""
    try:
        yield
    except ThinpipeError as refusal:
        lines = str(refusal).splitlines()
    else:
        return
    assert 1 <= len(lines) <= 2


part = st.sampled_from(["80mbit", "25ms", "unlimited", "loss=1%", "jitter=", "up=3gbit", "cc=bbr", "=", ",", "/", "1e9", "٣mbit", "\n"])
speeds = st.none() | st.floats(1e3, 1e12)
links = st.builds(
    Link, up=speeds, down=speeds, delay=st.floats(0, 10), loss=st.floats(0, 1, exclude_max=True), cc=st.sampled_from([None, "bbr"])
)


@quick
@given(st.text(max_size=30) | st.lists(part, max_size=8).map("".join), st.integers(0, 3))
def test_any_text_is_links_or_an_error(text: str, boundaries: int) -> None:
    with refusal_or_nothing():
        assert len(parse_links(text, boundaries)) == boundaries


@quick
@given(st.lists(links, min_size=2, max_size=4))
def test_links_survive_their_text(chain: list[Link]) -> None:
    assert parse_links("/".join(map(str, chain)), len(chain)) == tuple(chain)


groups = st.sampled_from(["run", "model", "data", "compression", "pipeline", "train", "optim", "network", "plan"]) | WORD
names = "name width layers steps lr betas files nodes rdzv stage_table method link clip layers_per_segment".split()  # noqa: SIM905
values = JSON | st.integers(1, 9) | st.lists(st.floats(0, 1), min_size=2, max_size=2)
configs = st.dictionaries(groups, st.dictionaries(st.sampled_from(names) | WORD, values, max_size=3) | JSON, max_size=3)


@quick
@given(configs)
def test_any_values_are_a_config_or_an_error(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    with refusal_or_nothing():
        config = from_dict(values).check()
        path = tmp_path_factory.mktemp("any") / "c.toml"
        path.write_text(dump(config), encoding="utf-8")
        assert load(path) == config


OPTIONS = (
    "--json --run.dir --train.steps --train.steps=3 --link --optim.lr -p --seed --data.files --staged --no-staged -- - -h run -1 1e400 nan"
)
options = st.sampled_from([*OPTIONS.split(), "", "\0", "é\n"])


@quick
@given(
    st.sampled_from(["eval", "generate", "export", "report", "plan", "", "x"]),
    st.lists(options | WORD, max_size=5),
)
def test_any_command_line_is_read_or_refused(command: str, rest: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), refusal_or_nothing(), contextlib.suppress(SystemExit):  # of --help
        cli.parse([command, *rest])


speed_runs = st.builds(speed_run, st.sampled_from([20240520, 20240801]), st.sampled_from([1, 7]), st.integers(-1, 9), st.integers(0, 9))


@quick
@given(st.binary(max_size=80) | st.builds(lambda whole, rest: whole + rest, speed_runs, st.binary(max_size=3)))
def test_any_bytes_are_tokens_or_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    made = tmp_path_factory.mktemp("bin")
    put(made / "a.bin", content)
    with refusal_or_nothing():
        data = prepare(from_dict({"model": {"context": 2}, "data": {"files": [str(made / "a.bin")], "cache": str(made / "c")}}))
        assert len(data.train) + len(data.val) in (len(content) // 2, len(content) // 2 - 512, len(content) // 4 - 256)


@quick
@given(st.lists(st.binary(max_size=12) | JSON.map(lambda v: json.dumps({"text": v}).encode()), max_size=6).map(b"\n".join))
def test_any_bytes_are_json_lines_or_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    made = tmp_path_factory.mktemp("jsonl")
    put(made / "a.jsonl", content)
    with refusal_or_nothing():
        prepare(from_dict({"model": {"context": 2}, "data": {"files": [str(made / "a.jsonl")], "vocab": 257, "cache": str(made / "c")}}))


@quick
@given(st.lists(st.binary(max_size=12) | JSON.map(lambda v: json.dumps({"event": "step", "step": v}).encode()), max_size=6).map(b"\n".join))
def test_any_bytes_are_metrics(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = put(tmp_path_factory.mktemp("metrics") / "metrics.jsonl", content)
    before = list(read_events(path))
    assert all(isinstance(event["event"], str) for event in before)
    Metrics(path, 9, 3, quiet=True).close()
    assert all(event.get("step", 0) <= 3 for event in read_events(path))


@quick
@given(st.sampled_from([*llama_config(SPEC), "rope_scaling"]), JSON)
def test_any_hugging_face_config_is_sizes_or_an_error(tmp_path_factory: pytest.TempPathFactory, name: str, value: Any) -> None:
    path = put(tmp_path_factory.mktemp("hf") / "config.json", json.dumps(llama_config(SPEC) | {name: value}))
    with refusal_or_nothing():
        from_dict({"model": {"hf_config": str(path)}}).check().spec(300)


@pytest.fixture(scope="module")
def harmed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose manifest each example writes anew."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("harmed") / "run")


def look(run: Path, whole: Path, content: Any, sealed: bool) -> None:
    """Load the run as `eval` does, with that manifest."""
    from thinpipe.inference import load_run

    path = run / STEP / "manifest.json"
    if sealed and isinstance(content, dict):
        content = {key: value for key, value in content.items() if key != "sha256"}
        content |= {"sha256": checkpoint._digest(content)}
    path.write_text(json.dumps(content))
    with contextlib.redirect_stderr(io.StringIO()), refusal_or_nothing():
        load_run(run)


@quick
@given(content=JSON, sealed=st.booleans())
def test_any_json_is_no_manifest(harmed: Path, trained: Path, content: Any, sealed: bool) -> None:
    look(harmed, trained, content, sealed)


@quick
@given(data=st.data(), sealed=st.booleans())
def test_any_changed_field_of_a_manifest_is_believed_or_refused(harmed: Path, trained: Path, data: st.DataObject, sealed: bool) -> None:
    content = json.loads((trained / STEP / "manifest.json").read_text())
    place = content
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or data.draw(st.integers(0, 3)) == 0:
            break
        place = place[key]
    place[key] = data.draw(JSON)
    look(harmed, trained, content, sealed)


# --- real processes ---------------------------------------------------------------------------------------------------------------------


def test_real_processes(trained: Path, folder: Path) -> None:
    """The command itself, an argument that is no text, and a mistake that only a stage's process finds."""
    made = hugging_face(folder)
    put(made / "model.safetensors", b"\xff" * 99)
    texts = {"files": [str(trained.parent / "texts" / "*.txt")], "cache": str(trained.parent / "cache")}
    groups = {"compression": {"method": "none", "segments": 1}, "model": {"init_from": str(made)}, "data": texts | {"vocab": 300}}
    values = tiny(**groups)
    values["model"] = groups["model"]
    values["data"] |= {"validation": 0.3}
    put(folder / "init.toml", dump(from_dict(values)))
    asked: list[tuple[list[bytes | str], str]] = [
        (["plan", "init.toml", "--link", "fast"], "--link 'fast' has no delay"),
        (["eval", b"caf\xe9"], r"is not UTF-8"),
        (["train", "init.toml"], UNREADABLE),
    ]
    before = contents(folder)
    running = [
        subprocess.Popen([sys.executable, "-m", "thinpipe", *words], stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        for words, _ in asked
    ]
    for process, (_, says) in zip(running, asked, strict=True):
        _, err = process.communicate(timeout=50)
        expect_refusal(process.returncode, err.decode(), says)
    assert before.items() <= contents(folder).items()
