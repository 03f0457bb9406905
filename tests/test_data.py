"""Batches, hold-out, sources and cache of thinpipe.data, with real files and the real tokenizers and datasets libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from thinpipe.config import Config, DataConfig, ModelConfig, RunConfig, ThinpipeError, to_dict
from thinpipe.data import PAD, Data, expected_vocab, prepare


def in_memory(train: int, context: int, seed: int = 0, val: int = 50) -> Data:
    """Data whose ids are their own positions, so that windows can be read off."""
    return Data(
        train=np.arange(train, dtype=np.uint32),
        val=np.arange(val, dtype=np.uint32),
        vocab=max(train, val),
        tokenizer=None,
        end_of_text=None,
        val_bytes=None,
        digest="",
        context=context,
        seed=seed,
    )


def make(tmp_path: Path, *files: str, context: int = 8, seed: int = 0, model_vocab: int | None = None, **data: Any) -> Config:
    """A config on files of tmp_path, with a cache there."""
    paths = tuple(str(tmp_path / name) for name in files)
    fields: dict[str, Any] = {"vocab": 300, "validation": 0.2, "cache": str(tmp_path / "cache"), "files": paths} | data
    return Config(run=RunConfig(seed=seed), model=ModelConfig(context=context, vocab=model_vocab), data=DataConfig(**fields))


def write_texts(tmp_path: Path, count: int = 24) -> list[str]:
    """Files that each repeat a random word of their own."""
    random = np.random.default_rng(5)
    texts = [" ".join(["", *["".join(random.choice(list("abcdefghij"), 12))] * 9]) for _ in range(count)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:03d}.txt").write_text(text)
    return texts


def write_speed_run(path: Path, ids: list[int], version: int = 1, count: int | None = None) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())


def fails(config: Config, *parts: str) -> None:
    """`prepare` fails with one line that holds all parts, and leaves nothing in the cache."""
    with pytest.raises(ThinpipeError) as caught:
        prepare(config)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert not list(Path(str(config.data.cache)).glob("tmp-*"))


# --- batches ----------------------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 8), st.integers(1, 7), st.integers(-3, 2**62))
@example(context=2, windows=5, rest=1, size=3, seed=-1)
def test_every_window_exactly_once_per_epoch(context: int, windows: int, rest: int, size: int, seed: int) -> None:
    data = in_memory(windows * context + 1 + min(rest, context - 1), context, seed)
    assert data.windows == windows
    stream = np.concatenate([data.batch(step, size) for step in range(-(-2 * windows // size))])
    for epoch in (stream[:windows], stream[windows : 2 * windows]):
        assert sorted(epoch[:, 0] // context) == list(range(windows))
    assert (stream - stream[:, :1] == np.arange(context + 1)).all()


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(12)))
def test_a_batch_depends_on_nothing_but_its_step(steps: list[int]) -> None:
    data, other = in_memory(101, 5, seed=3), in_memory(101, 5, seed=3)
    expected = [other.batch(step, 6) for step in range(12)]
    for step in steps:
        assert np.array_equal(data.batch(step, 6), expected[step])


def test_batches_are_int64_and_orders_differ_by_seed_and_epoch() -> None:
    data = in_memory(1001, 10)
    assert data.batch(0, 4).dtype == np.int64
    assert data.batch(0, 4).shape == (4, 11)
    assert not np.array_equal(data.batch(0, 100), data.batch(1, 100))  # two epochs
    assert not np.array_equal(data.batch(0, 100), in_memory(1001, 10, seed=1).batch(0, 100))


def test_validation_covers_the_split_in_order_and_pads_the_last_batch() -> None:
    batches = list(in_memory(100, 10, val=55).validation(size=3))
    assert [batch.shape for batch in batches] == [(3, 11), (3, 11)]
    assert np.concatenate(batches)[:5, 0].tolist() == [0, 10, 20, 30, 40]
    assert (batches[1][2] == PAD).all()
    assert sum((batch[:, 1:] != PAD).sum() for batch in batches) == 50
    assert len(list(in_memory(100, 10, val=55).validation(size=3, limit=1))) == 1
    (spread,) = in_memory(100, 10, val=91).validation(size=3, limit=1)  # of nine windows the first, fourth and seventh
    whole = np.concatenate(list(in_memory(100, 10, val=91).validation(size=3)))
    assert np.array_equal(spread, whole[[0, 3, 6]])
    assert len(list(in_memory(100, 10, val=55).validation(size=3, limit=9))) == 2
    assert len(list(in_memory(100, 10, val=61).validation(size=3))) == 2


def test_validation_shorter_than_a_window_is_padded() -> None:
    (batch,) = in_memory(100, 10, val=4).validation(size=2)
    assert batch[0].tolist() == [0, 1, 2, 3] + [PAD] * 7
    assert (batch[1] == PAD).all()


# --- hold-out and tokenizer -------------------------------------------------------------------------------------------------------------


def test_held_out_documents_never_train_model_or_tokenizer(tmp_path: Path) -> None:
    texts = write_texts(tmp_path)
    data = prepare(make(tmp_path, "*.txt", vocab=1000))
    assert data.tokenizer is not None
    assert data.end_of_text == 0
    train, val = (data.decode(ids).split("<|endoftext|>") for ids in (data.train, data.val))
    assert train.pop() == val.pop() == ""
    assert sorted(train + val) == sorted(texts)
    assert 1 <= len(val) <= len(texts) // 2
    assert data.val_bytes == sum(len(text.encode()) for text in val)
    # A word repeated in one document is an entry of the tokenizer if and only if that document trains.
    entries = data.tokenizer.get_vocab()
    assert {text for text in texts if "Ġ" + text.split()[0] in entries} == set(train)
    assert data.vocab == len(entries)


def test_identical_documents_land_on_the_same_side(tmp_path: Path) -> None:
    texts = write_texts(tmp_path)
    for number, text in enumerate(texts):
        (tmp_path / f"copy{number}.txt").write_text(text)
    data = prepare(make(tmp_path, "*.txt"))
    for ids in (data.train, data.val):
        documents = data.decode(ids).split("<|endoftext|>")[:-1]
        assert all(documents.count(document) == 2 for document in documents)


@pytest.mark.parametrize("validation", [1e-9, 0.999999999])
def test_each_split_has_a_document(tmp_path: Path, validation: float) -> None:
    write_texts(tmp_path, 5)
    data = prepare(make(tmp_path, "*.txt", validation=validation))
    counts = [int((ids == data.end_of_text).sum()) for ids in (data.train, data.val)]
    assert counts == ([4, 1] if validation < 0.5 else [1, 4])


def test_text_survives_encoding(tmp_path: Path) -> None:
    text = "naïve 漢字 🙂\tdef f(x):\r\n"
    (tmp_path / "a.txt").write_text(text * 3, newline="")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfwith a byte order mark")
    (tmp_path / "blank.txt").write_text(" \n")
    data = prepare(make(tmp_path, "*.txt", context=2, validation=0.5))
    assert data.decode(data.encode(text)) == text
    assert data.decode([*data.encode("abc"), PAD, PAD]) == "abc"
    documents = (data.decode(data.train) + data.decode(data.val)).split("<|endoftext|>")
    assert sorted(documents) == sorted(["", text * 3, "with a byte order mark"])


def given_tokenizer(tmp_path: Path, end: str | None) -> tuple[Tokenizer, str]:
    """A small tokenizer.json that truncates and pads, as those of encoders do."""
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if end:
        tokenizer.add_special_tokens([end])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    path = tmp_path / "given.json"
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    return tokenizer, str(path)


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>", None])
def test_given_tokenizer(tmp_path: Path, end: str | None) -> None:
    texts = write_texts(tmp_path, 6)
    _, path = given_tokenizer(tmp_path, end)
    config = make(tmp_path, "*.txt", tokenizer=path)
    data = prepare(config)
    assert data.end_of_text == (256 if end else None)
    assert data.vocab == expected_vocab(config) == (257 if end else 256)
    assert len(data.train) + len(data.val) == sum(map(len, texts)) + (6 if end else 0)
    assert data.val_bytes == len(data.val) - int((data.val == 256).sum())


@pytest.mark.parametrize("content", [b"not json", b"{}", b"\xff"])
def test_bad_tokenizer(tmp_path: Path, content: bytes) -> None:
    write_texts(tmp_path, 3)
    (tmp_path / "bad.json").write_bytes(content)
    fails(make(tmp_path, "*.txt", tokenizer=str(tmp_path / "bad.json")), "data.tokenizer", "bad.json", "not a tokenizer.json")


def test_missing_tokenizer(tmp_path: Path) -> None:
    write_texts(tmp_path, 3)
    fails(make(tmp_path, "*.txt", tokenizer=str(tmp_path / "none.json")), "data.tokenizer", "none.json", "No such file")


# --- text sources -----------------------------------------------------------------------------------------------------------------------


def splits(data: Data) -> list[str]:
    return sorted(filter(None, (data.decode(data.train) + data.decode(data.val)).split("<|endoftext|>")))


@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n", "\n", " ", ""], ids=["blank line", "CRLF", "line", "space", "none"])
def test_a_large_file_is_cut_into_documents(tmp_path: Path, separator: str) -> None:
    random = np.random.default_rng(0)
    lines = ["".join(random.choice(list("abcé漢🙂"), 40)) for _ in range(4000)]
    text = separator.join(lines)
    (tmp_path / "large.txt").write_text(text, encoding="utf-8", newline="")
    data = prepare(make(tmp_path, "large.txt", validation=0.5))
    documents = splits(data)
    assert sorted(text) == sorted("".join(documents))
    assert all(document in text for document in documents)
    assert max(len(document.encode()) for document in documents) <= (65536 + 400 if separator else 4 * 65536)
    assert sum(not document.endswith(separator) for document in documents) <= 1  # the last


def test_jsonl(tmp_path: Path) -> None:
    lines = [json.dumps({"body": f"line {number}", "text": 1}) for number in range(10)]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines[:5]).encode())
    (tmp_path / "b.ndjson").write_text("\n\n".join(lines[5:]) + "\n")
    data = prepare(make(tmp_path, "a.jsonl", "b.ndjson", field="body"))
    assert splits(data) == [f"line {number}" for number in range(10)]


@pytest.mark.parametrize("line", ["{", "[1]", "3", '"text"', '{"other": "x"}', '{"text": 3}', '{"text": null}', '{"text": "\\ud800"}'])
def test_bad_jsonl_names_file_and_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n\n{line}\n{{"text": "two"}}\n')
    fails(make(tmp_path, "a.jsonl"), "a.jsonl:3:", "'text'", "data.field")


def test_not_utf8_names_file_and_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    fails(make(tmp_path, "a.txt"), "a.txt", "byte 3 ", "UTF-8")
    (tmp_path / "b.txt").write_bytes(b"line\n" * 40000 + b"\xe9 latin")
    fails(make(tmp_path, "b.txt"), "b.txt", "byte 200000 ", "UTF-8")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    fails(make(tmp_path, "c.jsonl"), "c.jsonl", "byte 24 ", "UTF-8")


def test_text_errors(tmp_path: Path) -> None:
    fails(make(tmp_path, "*.txt"), "data.files", "*.txt", "matches no file")
    fails(make(tmp_path, "missing.txt"), "data.files", "missing.txt", "matches no file")
    (tmp_path / "empty.txt").write_text("")
    fails(make(tmp_path, "empty.txt"), "data.files", "no text")
    (tmp_path / "a.txt").write_text("one document")
    fails(make(tmp_path, "a.txt"), "one document only", "more text")
    (tmp_path / "b.txt").write_text("another document")
    fails(make(tmp_path, "a.txt", "b.txt", context=999), "training split has", "model.context = 999", "at least 1000")
    np.save(tmp_path / "a.npy", np.arange(9))
    fails(make(tmp_path, "a.txt", "a.npy"), "mixes token files", "a.txt", "a.npy")


def test_a_file_is_read_once_though_two_patterns_match_it(tmp_path: Path) -> None:
    texts = write_texts(tmp_path, 4)
    assert splits(prepare(make(tmp_path, "*.txt", "000.txt"))) == sorted(texts)


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [f"row {number}" for number in range(10)]
    pyarrow.parquet.write_table(pa.table({"body": [*rows, None, ""], "n": range(12)}), tmp_path / "a.parquet")
    data = prepare(make(tmp_path, "a.parquet", field="body"))
    assert splits(data) == rows
    fails(make(tmp_path, "a.parquet"), "a.parquet", "no column 'text'", "body, n")
    fails(make(tmp_path, "a.parquet", field="n"), "a.parquet", "column 'n' holds int")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not parquet")
    fails(make(tmp_path, "bad.parquet"), "bad.parquet", "can't be read")


def test_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [f"row {number}" for number in range(10)]
    saved = datasets.Dataset.from_dict({"text": rows, "n": list(range(10))})
    saved.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": saved, "rest": saved.select(range(5))}).save_to_disk(tmp_path / "dict")
    assert splits(prepare(make(tmp_path, dataset=str(tmp_path / "plain")))) == rows
    assert splits(prepare(make(tmp_path, dataset=str(tmp_path / "dict"), split="rest"))) == rows[:5]
    fails(make(tmp_path, dataset=str(tmp_path / "dict"), split="test"), "no split 'test'", "train, rest")
    fails(make(tmp_path, dataset=str(tmp_path / "plain"), field="body"), "no column 'body'", "text, n")
    fails(make(tmp_path, dataset=str(tmp_path / "plain"), field="n"), "column 'n' holds int")
    fails(make(tmp_path, dataset=str(tmp_path)), "data.dataset", "save_to_disk")
    fails(make(tmp_path, dataset="nobody/nothing"), "data.dataset", "nobody/nothing")


def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    fails(make(tmp_path, dataset="nobody/nothing"), "data.dataset", "thinpipe[hf]")


# --- token files ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int64.npy", "uint16.npy", "raw.bin", "speed-run.bin", "llama.bin"])
def test_token_files_hold_out_their_tail(tmp_path: Path, kind: str) -> None:
    ids = np.random.default_rng(0).integers(0, 50000, 1000)
    if kind == "raw.bin":
        (tmp_path / kind).write_bytes(ids.astype("<u2").tobytes())
    elif kind == "speed-run.bin":
        write_speed_run(tmp_path / kind, ids.tolist())
    elif kind == "llama.bin":
        header = np.array([20240801, 7, len(ids)] + [0] * 253, "<i4")
        (tmp_path / kind).write_bytes(header.tobytes() + ids.astype("<u4").tobytes())
    else:
        np.save(tmp_path / kind, ids.astype(kind.split(".")[0]))
    data = prepare(make(tmp_path, kind))
    assert np.array_equal(data.train, ids[:800])
    assert np.array_equal(data.val, ids[800:])
    assert data.train.dtype == np.uint16
    assert (data.vocab, data.tokenizer, data.end_of_text, data.val_bytes) == (ids.max() + 1, None, None, None)
    with pytest.raises(ThinpipeError, match=r"data\.tokenizer"):
        data.decode([1])


def test_token_files_are_joined_in_order(tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.arange(300))
    np.save(tmp_path / "a.npy", np.arange(300, 400))
    np.save(tmp_path / "none.npy", np.arange(0))
    data = prepare(make(tmp_path, "b.npy", "none.npy", "a.npy", validation=0.5))
    assert data.train.tolist() == list(range(200))
    assert data.val.tolist() == list(range(200, 400))


def test_ids_beyond_16_bits_survive(tmp_path: Path) -> None:
    ids = np.arange(65530, 66530)
    ids.astype("<u4").tofile(tmp_path / "ids.bin")
    data = prepare(make(tmp_path, "ids.bin", dtype="uint32"))
    assert data.train.dtype == np.uint32
    assert data.vocab == 66530
    assert data.batch(0, 99).max() == 65530 + 99 * 8
    np.save(tmp_path / "edge.npy", np.array([65535] * 50))
    assert prepare(make(tmp_path, "edge.npy")).train.dtype == np.uint16


def test_token_files_with_a_tokenizer_are_held_out_by_document(tmp_path: Path) -> None:
    tokenizer, path = given_tokenizer(tmp_path, "</s>")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = write_texts(tmp_path)
    encoded = [id for text in texts for id in [*tokenizer.encode(text).ids, 256]]
    write_speed_run(tmp_path / "ids.bin", encoded)
    data = prepare(make(tmp_path, "ids.bin", tokenizer=path))
    train, val = (data.decode(ids).split("</s>")[:-1] for ids in (data.train, data.val))
    assert sorted(train + val) == sorted(texts)
    assert 1 <= len(val) <= len(texts) // 2
    assert val != texts[-len(val) :]
    assert (data.vocab, data.end_of_text, data.val_bytes) == (257, 256, None)
    # The end-of-text id never occurs: no documents to tell apart, so the tail again.
    np.save(tmp_path / "plain.npy", np.arange(100))
    assert prepare(make(tmp_path, "plain.npy", tokenizer=path)).val.tolist() == list(range(80, 100))


@pytest.mark.parametrize(
    ("header", "parts"),
    [({"version": 2}, ["version 1"]), ({"count": 99}, ["counts 99", "100 follow"]), ({"count": 101}, ["counts 101", "100 follow"])],
)
def test_wrong_speed_run_header(tmp_path: Path, header: dict[str, int], parts: list[str]) -> None:
    write_speed_run(tmp_path / "ids.bin", list(range(100)), **header)
    fails(make(tmp_path, "ids.bin"), "ids.bin", *parts)


def test_cut_off_token_files(tmp_path: Path) -> None:
    write_speed_run(tmp_path / "a.bin", list(range(100)))
    whole = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(whole[:-1])
    fails(make(tmp_path, "a.bin"), "a.bin", "counts 100", "99.5 follow")
    (tmp_path / "a.bin").write_bytes(whole[:600])
    fails(make(tmp_path, "a.bin"), "a.bin", "header")
    (tmp_path / "b.bin").write_bytes(b"abcde")
    fails(make(tmp_path, "b.bin"), "b.bin", "5 bytes", "uint16", "data.dtype")
    np.save(tmp_path / "c.npy", np.arange(100))
    (tmp_path / "c.npy").write_bytes((tmp_path / "c.npy").read_bytes()[:300])
    fails(make(tmp_path, "c.npy"), "c.npy", "not a whole .npy file")


def test_token_file_errors(tmp_path: Path) -> None:
    for name, array in {"flat": np.zeros((9, 9), int), "float": np.zeros(99)}.items():
        np.save(tmp_path / f"{name}.npy", array)
        fails(make(tmp_path, f"{name}.npy"), f"{name}.npy", "one-dimensional array of integers")
    for name, content in {"text": b"hello", "nothing": b""}.items():
        (tmp_path / f"{name}.npy").write_bytes(content)
        fails(make(tmp_path, f"{name}.npy"), f"{name}.npy", "not a whole .npy file")
    (tmp_path / "empty.bin").write_bytes(b"")
    fails(make(tmp_path, "empty.bin"), "training split has 0 tokens")
    np.save(tmp_path / "short.npy", np.arange(11))
    fails(make(tmp_path, "short.npy", validation=0.01), "validation split is empty", "data.validation")
    fails(make(tmp_path, "short.npy", context=20), "training split has 9 tokens", "model.context = 20")


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    ids = np.arange(100)
    ids[70] = 500
    np.save(tmp_path / "a.npy", ids)
    fails(make(tmp_path, "a.npy", model_vocab=500), "a.npy", "token 70 has id 500", "the 500 ids of model.vocab")
    assert prepare(make(tmp_path, "a.npy", model_vocab=501)).vocab == 501
    _, path = given_tokenizer(tmp_path, "</s>")
    fails(make(tmp_path, "a.npy", tokenizer=path), "a.npy", "token 70 has id 500", "257", "data.tokenizer")
    ids[70] = -1
    np.save(tmp_path / "b.npy", ids)
    fails(make(tmp_path, "b.npy"), "b.npy", "token 70 has id -1")


# --- cache ------------------------------------------------------------------------------------------------------------------------------


def entries(tmp_path: Path) -> dict[str, int]:
    """Cache entries and when they were made."""
    return {path.name: (path / "meta.json").stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}


def test_cache_is_used_again_until_something_changes(tmp_path: Path) -> None:
    write_texts(tmp_path)
    config = make(tmp_path, "*.txt")
    first = prepare(config)
    made = entries(tmp_path)
    again = prepare(config)
    assert entries(tmp_path) == made
    assert again.digest == first.digest
    assert np.array_equal(again.train, first.train)
    # What is not in the entry needs no new one, though machines that differ in it must notice.
    assert prepare(make(tmp_path, "*.txt", seed=1)).digest != first.digest
    assert prepare(make(tmp_path, "*.txt", context=9)).digest != first.digest
    assert entries(tmp_path) == made
    prepare(make(tmp_path, "*.txt", vocab=301))
    prepare(make(tmp_path, "*.txt", validation=0.3))
    assert len(entries(tmp_path)) == 3
    (tmp_path / "000.txt").write_text("changed, and of another length")
    assert prepare(config).digest != first.digest
    assert len(entries(tmp_path)) == 4


def test_digest_depends_on_content_not_on_place(tmp_path: Path) -> None:
    digests = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        write_texts(folder)
        digests.append(prepare(make(folder, "*.txt")).digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_damaged_entry_is_rebuilt(tmp_path: Path, name: str, damage: str) -> None:
    write_texts(tmp_path, 8)
    config = make(tmp_path, "*.txt")
    first = prepare(config)
    (path,) = (tmp_path / "cache").glob(f"*/{name}")
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-3] if damage == "cut" else bytes([content[0] ^ 1]) + content[1:])
    assert prepare(config).digest == first.digest
    assert [p.read_bytes() for p in (tmp_path / "cache").glob(f"*/{name}")] == [content]


def test_default_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path, 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    prepare(make(tmp_path, "*.txt", cache=None))
    assert len(list((tmp_path / "xdg" / "thinpipe").iterdir())) == 1


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    write_texts(tmp_path, 3)
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ThinpipeError, match=r"data\.cache: .*cache: "):
        prepare(make(tmp_path, "*.txt"))


def test_processes_prepare_at_once(tmp_path: Path) -> None:
    write_texts(tmp_path)
    config = make(tmp_path, "*.txt")
    prepare(config)
    ((entry, _),) = entries(tmp_path).items()
    (tmp_path / "cache" / entry / "val.bin").write_bytes(b"damaged")  # so that both must also clear the way
    script = f"""
from pathlib import Path
from thinpipe.config import from_dict
from thinpipe.data import prepare
Path({str(tmp_path)!r}, f"ready{{__import__('os').getpid()}}").touch()
while len(list(Path({str(tmp_path)!r}).glob("ready*"))) < 2:
    pass
print(prepare(from_dict({to_dict(config)!r})).digest)
"""
    processes = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in "ab"]
    results = [process.communicate(timeout=60) for process in processes]
    digest = prepare(config).digest + "\n"
    assert results == [(digest, ""), (digest, "")]
    assert list(entries(tmp_path)) == [entry]


def test_standard_library(tmp_path: Path) -> None:
    config = make(tmp_path, vocab=512, context=128, validation=0.05)
    data = prepare(config)
    assert data.vocab == 512
    assert data.train.dtype == np.uint16
    assert data.val_bytes is not None
    assert 0.01 < len(data.val) / len(data.train) < 0.3
    assert 1 < data.val_bytes / len(data.val) < 4
    assert "def " in data.decode(data.batch(0, 8).ravel())
    assert (data.batch(7, 4) < 512).all()
    made = entries(tmp_path)
    assert prepare(config).digest == data.digest
    assert entries(tmp_path) == made
