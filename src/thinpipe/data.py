"""Batches as a pure function of (seed, step), from text or token files that are prepared once and cached.

A corpus is a sequence of documents. Some are held out for validation by a hash of their content; the others train the tokenizer and
the model. Ids lie in memory-mapped files and are read in windows: T + 1 ids, of which the first T are inputs and the last T targets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import hashlib
import importlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from thinpipe.config import LARGEST_VOCAB, Config, DataConfig, ThinpipeError

PAD = -1
"""No token here: ignored by the loss."""

_END_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>")
_NOT_STDLIB = {"test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3", "ensurepip"}
_NOT_STDLIB |= {"site-packages", "dist-packages", "__pycache__"}
_SPEED_RUN = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version and type, as llm.c writes them for GPT-2 and for Llama 3
_DOCUMENT = 1 << 16  # bytes after which a text file is cut, so that one file of text can be held out in part
_CHUNK = 1 << 22  # ids handled at once
_REHASH = 1 << 30  # bytes above which a cached file is trusted by its size: reading it again would delay every start
_FORMAT = 1  # of the cache; raise it when what an entry holds changes


@dataclass(frozen=True, eq=False)
class Data:
    """A tokenized corpus. T = context; a window is T + 1 ids that overlaps the next one by one id."""

    train: np.ndarray
    """Ids of the training split (uint16 or uint32, memory-mapped)."""
    val: np.ndarray
    """Ids of the validation split."""
    vocab: int
    """Entries of the tokenizer; for token files without one: the largest id + 1."""
    tokenizer: Tokenizer | None
    end_of_text: int | None
    """Id that ends every document, if the tokenizer has one."""
    val_bytes: int | None
    """UTF-8 bytes of the validation text: bits per byte = loss / ln 2 * len(val) / val_bytes. None for token files."""
    digest: str
    """SHA-256 (hex) over tokens, tokenizer and the start of the first epoch's order: what machines compare."""
    context: int
    seed: int

    @property
    def windows(self) -> int:
        """Windows of the training split: sequences per epoch."""
        return max(0, (len(self.train) - 1) // self.context)

    def batch(self, step: int, size: int) -> np.ndarray:
        """Sequences step * size to (step + 1) * size of the endless shuffled stream, (size, T + 1) int64."""
        epochs, places = np.divmod(np.arange(step * size, (step + 1) * size), self.windows)
        starts = [_order(self.seed, int(epoch), self.windows)[place] * self.context for epoch, place in zip(epochs, places, strict=True)]
        offsets = np.array(starts, np.int64)[:, None] + np.arange(self.context + 1)
        return np.asarray(self.train[offsets], np.int64)

    def validation(self, size: int, limit: int = 0) -> Iterator[np.ndarray]:
        """Windows of the validation split in order, (size, T + 1) int64 each, at most `limit` arrays (0: all).

        A limited validation takes windows evenly from the whole split: its first documents alone are a poor sample. The last
        array is filled up with rows of PAD, and so is the only window of a split shorter than one.
        """
        windows = max(1, (len(self.val) - 1) // self.context)
        taken = min(windows, limit * size) if limit else windows
        chosen = [i * windows // taken for i in range(taken)]
        for first in range(0, taken, size):
            rows = np.full((size, self.context + 1), PAD, np.int64)
            for row, window in enumerate(chosen[first : first + size]):
                ids = self.val[window * self.context :][: self.context + 1]
                rows[row, : len(ids)] = ids
            yield rows

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end-of-text. Raises ThinpipeError if there is no tokenizer, or it can't encode the text."""
        return list(encode_all(self._need_tokenizer(), [text], f"the text {text[:40]!r}")[0].ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids (PAD is skipped). Raises ThinpipeError if there is no tokenizer."""
        return self._need_tokenizer().decode([int(i) for i in ids if i != PAD], skip_special_tokens=False)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ThinpipeError("token files have no tokenizer of their own; set data.tokenizer to the tokenizer.json that made them")
        return self.tokenizer


@functools.lru_cache(maxsize=2)  # a batch may stand on the border of two epochs
def _order(seed: int, epoch: int, windows: int) -> np.ndarray:
    key = np.array([seed % 2**64, epoch], np.uint64)  # a list with a number above 2^63 would pass through floats
    order = np.random.Generator(np.random.Philox(key=key)).permutation(windows)
    order.setflags(write=False)
    return order


def prepare(config: Config) -> Data:
    """Tokenize the corpus of `config.data`, or take it from the cache, and open it.

    Safe for several processes at once. Raises ThinpipeError if a source can't be read or holds too little, or an id is too large.
    """
    data, context = config.data, config.sizes()["context"]
    corpus = _corpus(data)
    default = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/thinpipe"
    try:
        cache = Path(data.cache or default).expanduser()
    except RuntimeError as error:  # a home that there isn't
        raise ThinpipeError(f"data.cache = {data.cache or default!r}: {_first_line(error)}; name a folder that can be written") from None
    entry = cache / _key(corpus, config)
    found = _load(entry, context, config.run.seed)
    if found is None:
        try:
            _make_entry(entry, corpus, config)
        except OSError as error:
            where = error.filename or cache
            raise ThinpipeError(f"data.cache: {where}: {error.strerror or error}; name a folder that can be written and has room") from None
        found = _load(entry, context, config.run.seed)
    if found is None:
        raise ThinpipeError(f"data.cache: {entry} can't be written or read back; remove it or name another folder")
    if not found.windows:
        more = f"model.context = {context} needs at least {context + 1}; give more text or a shorter context"
        raise ThinpipeError(f"{corpus.name}: the training split has {len(found.train)} tokens, but {more}")
    if len(found.val) < 2:
        raise ThinpipeError(f"{corpus.name}: the validation split is empty; raise data.validation = {data.validation} or give more text")
    return found


# --- the cache: one folder per key, made elsewhere and renamed -------------------------------------------------------------------------


def _key(corpus: _Corpus, config: Config) -> str:
    """Name of the cache entry: changes with everything that changes its content, with files known by size and time."""
    settings = dataclasses.asdict(dataclasses.replace(config.data, cache=None, source="local"))
    tokenizer = _tokenizer_bytes(config.data.tokenizer) if config.data.tokenizer else b""
    files = [(str(path.resolve()), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in corpus.files]
    limit = config.sizes().get("vocab") if corpus.documents is None else None  # checked while token files are copied
    parts = [_FORMAT, tokenizers.__version__, settings, hashlib.sha256(tokenizer).hexdigest(), limit, files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _make_entry(entry: Path, corpus: _Corpus, config: Config) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=entry.parent, ignore_cleanup_errors=True) as temporary:
        with contextlib.suppress(FileNotFoundError):
            entry.rename(Path(temporary, "damaged"))
        folder = Path(temporary, "new")
        folder.mkdir()
        if corpus.documents is None:
            meta = _build_tokens(corpus.files, config, folder)
        else:
            meta = _build_text(corpus.name, corpus.documents, config.data, folder)
        meta["files"] = {path.name: [path.stat().st_size, _sha256(path)] for path in sorted(folder.iterdir())}
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        with contextlib.suppress(OSError):  # another process was first: its entry serves as well
            folder.rename(entry)


def _load(entry: Path, context: int, seed: int) -> Data | None:
    """The data of a cache entry; None if it is missing or damaged."""
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        for name, (size, digest) in meta["files"].items():
            if (entry / name).stat().st_size != size or (size <= _REHASH and _sha256(entry / name) != digest):
                return None
        train, val = (_map(entry / name, _dtype(meta["vocab"])) for name in ("train.bin", "val.bin"))
        tokenizer = Tokenizer.from_file(str(entry / "tokenizer.json")) if "tokenizer.json" in meta["files"] else None
        found = Data(train, val, meta["vocab"], tokenizer, meta["end_of_text"], meta["val_bytes"], "", context, seed)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    start = _order(seed, 0, found.windows)[:64].tolist()
    compared = json.dumps([meta["files"], found.vocab, found.end_of_text, context, seed, start], sort_keys=True)
    return dataclasses.replace(found, digest=hashlib.sha256(compared.encode()).hexdigest())


def _dtype(vocab: int) -> str:
    return "<u2" if vocab <= 1 << 16 else "<u4"


def _map(path: Path, dtype: str, offset: int = 0) -> np.ndarray:
    """The ids in a file, memory-mapped; an empty file can't be mapped."""
    return np.memmap(path, dtype, "r", offset) if path.stat().st_size > offset else np.empty(0, dtype)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(folder: Path, pieces: Iterable[tuple[np.ndarray, bool]], vocab: int) -> None:
    """Append pieces (ids, held out for validation?) to train.bin and val.bin."""
    with (folder / "train.bin").open("wb") as train, (folder / "val.bin").open("wb") as val:
        for ids, held in pieces:
            (val if held else train).write(ids.astype(_dtype(vocab)).tobytes())


# --- the hold-out: by document, so that no validation text is ever seen in training ----------------------------------------------------


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, salt=b"thinpipe").digest(), "big")


def _hash_range(contents: Iterable[bytes]) -> tuple[int, int]:
    """Smallest and largest hash: crossed if there is nothing, equal if all documents are the same."""
    low, high = 1 << 64, -1
    for content in contents:
        value = _hash(content)
        low, high = min(low, value), max(high, value)
    return low, high


def _threshold(low: int, high: int, share: float) -> int:
    """Documents whose hash is below it are held out: about `share` of them, at least one and not all."""
    return min(max(int(share * 2**64), low + 1), high)


# --- text -------------------------------------------------------------------------------------------------------------------------------


def _build_text(name: str, documents: Callable[[], Iterator[str]], data: DataConfig, folder: Path) -> dict[str, Any]:
    low, high = _hash_range(text.encode() for text in documents())
    if low > high:
        raise ThinpipeError(f"{name} holds no text; give files with text in them")
    if low == high:
        raise ThinpipeError(f"{name} holds one document only, so none can be held out for validation; give more text")
    threshold = _threshold(low, high, data.validation)
    val_bytes = 0

    def held(text: str) -> bool:
        return _hash(text.encode()) < threshold

    def encoded() -> Iterator[tuple[np.ndarray, bool]]:
        nonlocal val_bytes
        tail = [] if end_of_text is None else [end_of_text]
        for group in _groups(documents()):
            for text, encoding in zip(group, encode_all(tokenizer, group, name), strict=True):
                val_bytes += held(text) * len(text.encode())
                yield np.array(encoding.ids + tail, np.uint32), held(text)

    if data.tokenizer:
        tokenizer = read_tokenizer(data.tokenizer)
    else:
        tokenizer = _train_tokenizer((text for text in documents() if not held(text)), data.vocab)
    vocab, end_of_text = entries(tokenizer), end_of_text_id(tokenizer)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    _write(folder, encoded(), vocab)
    return {"vocab": vocab, "end_of_text": end_of_text, "val_bytes": val_bytes}


def _groups(documents: Iterable[str], characters: int = 1 << 20) -> Iterator[list[str]]:
    """Documents in lists of about so many characters: enough to encode in parallel, little to hold."""
    group: list[str] = []
    held = 0
    for text in documents:
        group.append(text)
        held += len(text)
        if held >= characters:
            yield group
            group, held = [], 0
    if group:
        yield group


def _train_tokenizer(documents: Iterator[str], vocab: int) -> Tokenizer:
    """Byte-level BPE; may end up with fewer entries where the text has too few pairs to merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[_END_OF_TEXT[0]], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _tokenizer_bytes(path: str) -> bytes:
    try:
        return Path(os.path.expanduser(path)).read_bytes()
    except OSError as error:
        raise ThinpipeError(f"data.tokenizer: {path}: {error.strerror}; give the path of a tokenizer.json") from None


def expected_vocab(config: Config) -> int:
    """Entries of the vocabulary as far as they can be told before any text is read: of the model, the named tokenizer, else data.vocab."""
    given: int | None = config.sizes().get("vocab")
    if given is None and config.data.tokenizer is not None:
        given = entries(read_tokenizer(config.data.tokenizer))
    return config.data.vocab if given is None else given


def read_tokenizer(path: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(_tokenizer_bytes(path))
    except ThinpipeError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ThinpipeError(f"data.tokenizer: {path} is not a tokenizer.json: {_first_line(error)}; write it anew") from None
    if not 0 < entries(tokenizer) <= LARGEST_VOCAB:
        what = f"ids up to {entries(tokenizer) - 1}, each a row of the embedding" if entries(tokenizer) else "no vocabulary"
        raise ThinpipeError(f"data.tokenizer: {path} has {what}; give one with 1 to {LARGEST_VOCAB} ids")
    tokenizer.no_truncation()  # some files carry the limits of the model that they were made for
    tokenizer.no_padding()
    return tokenizer


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], where: str) -> list[Encoding]:
    """Texts encoded without special tokens. Raises ThinpipeError that names `where` they come from if one can't be."""
    try:
        return list(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    except Exception as error:  # a word that is no entry, of a tokenizer without one for unknown words
        raise ThinpipeError(f"{where} can't be encoded by the tokenizer: {_first_line(error)}; set another data.tokenizer") from None


def entries(tokenizer: Tokenizer) -> int:
    """Ids may have holes; the embedding table needs rows up to the largest."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def end_of_text_id(tokenizer: Tokenizer) -> int | None:
    return next((id for id in map(tokenizer.token_to_id, _END_OF_TEXT) if id is not None), None)


# --- token files ------------------------------------------------------------------------------------------------------------------------


def _build_tokens(files: Sequence[Path], config: Config, folder: Path) -> dict[str, Any]:
    tokenizer = read_tokenizer(config.data.tokenizer) if config.data.tokenizer else None
    end_of_text = end_of_text_id(tokenizer) if tokenizer else None
    arrays = [_read_tokens(path, config.data.dtype) for path in files]
    # Garbage, 16 bits read as 32 for instance, must not become an embedding of billions of rows.
    given = config.sizes().get("vocab")
    limits = [(given, "model.vocab") if given else (LARGEST_VOCAB, "the largest vocabulary")]
    if tokenizer:
        limits.append((entries(tokenizer), "data.tokenizer"))
        (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    largest = max((_largest_id(path, ids, *min(limits)) for path, ids in zip(files, arrays, strict=True)), default=-1)
    vocab = entries(tokenizer) if tokenizer else largest + 1

    low = high = 0
    if end_of_text is not None and any((chunk == end_of_text).any() for ids in arrays for _, chunk in _chunks(ids)):
        low, high = _hash_range(_id_bytes(run) for run in _runs(arrays, end_of_text))
    if low < high:
        threshold = _threshold(low, high, config.data.validation)
        _write(folder, ((run, _hash(_id_bytes(run)) < threshold) for run in _runs(arrays, end_of_text)), vocab)
    else:
        _write(folder, _tail_held_out(arrays, config.data.validation), vocab)
    return {"vocab": vocab, "end_of_text": end_of_text, "val_bytes": None}


def _read_tokens(path: Path, dtype: str) -> np.ndarray:
    """The ids of a token file, memory-mapped. Raises ThinpipeError if it is not what it says."""
    try:
        return _read_npy(path) if path.suffix == ".npy" else _read_bin(path, dtype)
    except OSError as error:
        raise ThinpipeError(f"{path} can't be read: {error.strerror or _first_line(error)}") from None


def _read_npy(path: Path) -> np.ndarray:
    try:
        ids: np.ndarray = np.lib.format.open_memmap(path, mode="r")  # takes neither pickles nor archives, as numpy.load might
    except OSError:
        raise
    except Exception:  # of many kinds, as the header is damaged
        ids = np.empty(())
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ThinpipeError(f"{path}: not a whole .npy file of a one-dimensional array of integers; write the ids with numpy.save")
    return ids


def _read_bin(path: Path, dtype: str) -> np.ndarray:
    size, header = path.stat().st_size, np.fromfile(path, "<i4", 256)
    if len(header) and int(header[0]) in _SPEED_RUN:
        version, kind = _SPEED_RUN[int(header[0])]
        if len(header) < 256 or header[1] != version:
            raise ThinpipeError(f"{path}: speed-run header is not 256 numbers of version {version}; write the file again")
        there = (size - header.nbytes) / np.dtype(kind).itemsize
        if header[2] != there:
            raise ThinpipeError(f"{path}: header counts {header[2]} tokens, but {there:.10g} follow; write the file again")
        return _map(path, kind, header.nbytes)
    if size % np.dtype(dtype).itemsize:
        raise ThinpipeError(f"{path}: {size} bytes are not whole {dtype} ids; set data.dtype or write the file again")
    return _map(path, np.dtype(dtype).newbyteorder("<").str)


def _chunks(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Position and ids of parts small enough for temporary arrays."""
    return ((start, ids[start : start + _CHUNK]) for start in range(0, len(ids), _CHUNK))


def _largest_id(path: Path, ids: np.ndarray, limit: int, limited_by: str) -> int:
    largest = -1
    for start, chunk in _chunks(ids):
        if wrong := np.flatnonzero((chunk < 0) | (chunk >= limit)).tolist():
            what = f"token {start + wrong[0]} has id {chunk[wrong[0]]}, outside the {limit} ids of {limited_by}"
            raise ThinpipeError(f"{path}: {what}; give files, data.dtype and {limited_by} that belong together")
        largest = max(largest, int(chunk.max()))
    return largest


def _id_bytes(ids: np.ndarray) -> bytes:
    return ids.astype("<u4").tobytes()  # one width, so that a document's side doesn't depend on its file's


def _runs(arrays: Iterable[np.ndarray], end: int | None) -> Iterator[np.ndarray]:
    """Documents: runs that stop after an end-of-text or with the file."""
    for ids in arrays:
        first = 0
        for start, chunk in _chunks(ids):
            for place in np.flatnonzero(chunk == end).tolist():
                yield ids[first : start + place + 1]
                first = start + place + 1
        if first < len(ids):
            yield ids[first:]


def _tail_held_out(arrays: Sequence[np.ndarray], share: float) -> Iterator[tuple[np.ndarray, bool]]:
    """Without documents to tell apart: the last `share` of all tokens."""
    total = sum(map(len, arrays))
    left = total - round(total * share)  # training tokens yet to come
    for ids in arrays:
        for _, chunk in _chunks(ids):
            yield chunk[:left], False
            yield chunk[left:], True
            left = max(0, left - len(chunk))


# --- where documents come from ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Corpus:
    name: str  # the field that it comes from, for errors
    files: Sequence[Path]  # their sizes and times tell whether a cache entry still holds
    documents: Callable[[], Iterator[str]] | None = None  # starts anew with every call; None: the files hold tokens


def _corpus(data: DataConfig) -> _Corpus:
    if data.dataset is not None:
        return _dataset(data)
    if not data.files:
        root = Path(sysconfig.get_paths()["stdlib"])
        sources = _stdlib(root)
        return _Corpus("data.corpus", sources, lambda: _not_blank(_decode(path.read_bytes(), path) for path in sources))
    files = _expand(data.files)
    tokens = [path for path in files if path.suffix in (".npy", ".bin")]
    if tokens and len(tokens) < len(files):
        text = next(path for path in files if path not in tokens)
        raise ThinpipeError(f"data.files mixes token files ({tokens[0]}) with text ({text}); keep one kind")
    if tokens:
        return _Corpus("data.files", files)
    return _Corpus("data.files", files, lambda: _not_blank(text for path in files for text in _read(path, data.field)))


def _not_blank(texts: Iterable[str]) -> Iterator[str]:
    return (text for text in texts if text and not text.isspace())


def _stdlib(root: Path) -> list[Path]:
    """The standard library's sources, without tests, tables and what differs between builds of one version."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]
        found += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _expand(patterns: Iterable[str]) -> list[Path]:
    found: dict[Path, None] = {}  # each file once, in order
    for pattern in patterns:
        name = os.path.expanduser(pattern)
        names = [name] if os.path.isfile(name) else sorted(filter(os.path.isfile, glob.glob(name, recursive=True)))
        if not names:
            raise ThinpipeError(f"data.files: {pattern!r} matches no file; give files or globs such as 'texts/*.txt'")
        found |= dict.fromkeys(map(Path, names))
    return list(found)


def _read(path: Path, field: str) -> Iterator[str]:
    """The documents of one file of text, JSON lines or parquet. Raises ThinpipeError that names the place."""
    readers = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".parquet": _read_parquet}
    try:
        yield from readers.get(path.suffix, _read_text)(path, field)
    except OSError as error:
        raise ThinpipeError(f"{path} can't be read: {error.strerror or _first_line(error)}") from None


def _decode(content: bytes, path: Path, offset: int = 0) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ThinpipeError(f"{path}: byte {offset + error.start} is not UTF-8; convert the file or leave it out") from None
    return text if offset else text.removeprefix("\ufeff")  # the mark that some editors put first


def _read_text(path: Path, _: str) -> Iterator[str]:
    offset, block = 0, b""
    with path.open("rb") as file:
        while block := block + file.read(4 * _DOCUMENT - len(block)):
            end = _end_of_document(block)
            yield _decode(block[:end], path, offset)
            offset, block = offset + end, block[end:]


def _end_of_document(block: bytes) -> int:
    """Where to cut: at the first blank line, else line, else space after 64 KiB; else as late as possible between two characters."""
    if len(block) <= _DOCUMENT:
        return len(block)
    for mark in (b"\n\n", b"\r\n\r\n", b"\n", b" "):
        place = block.find(mark, _DOCUMENT)
        if place >= 0:
            return place + len(mark)
    if len(block) < 4 * _DOCUMENT:  # the rest of the file
        return len(block)
    return next(end for end in range(len(block) - 1, 0, -1) if block[end] & 0xC0 != 0x80 or end < len(block) - 4)


def _read_jsonl(path: Path, field: str) -> Iterator[str]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = _decode(line, path, offset)
            offset += len(line)
            if text.isspace():
                continue
            try:
                document = json.loads(text)[field]
                document.encode()  # fails for what is not text, and for half of a surrogate pair
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise ThinpipeError(f"{path}:{number}: no JSON object with text in {field!r}; mend the line or set data.field") from None
            yield document


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    parquet = _extra("pyarrow.parquet", str(path))
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field in columns:
                for batch in file.iter_batches(columns=[field]):
                    yield from _texts(batch.column(0).to_pylist(), str(path), field)
                return
    except ThinpipeError:
        raise
    except ValueError as error:
        raise ThinpipeError(f"{path} can't be read as parquet: {_first_line(error)}") from None
    raise ThinpipeError(f"{path} has no column {field!r}; set data.field to one of {', '.join(columns)}")


def _dataset(data: DataConfig) -> _Corpus:
    datasets = _extra("datasets", "data.dataset")
    name = f"data.dataset = {data.dataset!r}"
    try:
        if Path(str(data.dataset)).is_dir():
            found = datasets.load_from_disk(data.dataset)
        else:
            hub_name, _, subset = str(data.dataset).partition(":")  # "hub/name" or "hub/name:subset"
            found = datasets.load_dataset(hub_name, subset or None, split=data.split)
    except Exception as error:  # of many kinds, the network's among them
        raise ThinpipeError(f"{name}: {_first_line(error)}; give a hub name or a folder made by save_to_disk") from None
    if isinstance(found, datasets.DatasetDict):
        if data.split not in found:
            raise ThinpipeError(f"{name} has no split {data.split!r}; set data.split to one of {', '.join(found)}")
        found = found[data.split]
    if data.field not in found.column_names:
        raise ThinpipeError(f"{name} has no column {data.field!r}; set data.field to one of {', '.join(found.column_names)}")
    column = found.select_columns([data.field])

    def texts() -> Iterator[str]:
        for batch in column.iter(batch_size=1000):
            yield from _texts(batch[data.field], name, data.field)

    return _Corpus(name, [Path(file["filename"]) for file in found.cache_files], lambda: _not_blank(texts()))


def _texts(values: Iterable[Any], where: str, field: str) -> Iterator[str]:
    """The texts of a column; a missing value is no document."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif value is not None:
            raise ThinpipeError(f"{where}: column {field!r} holds {type(value).__name__}, not text; set data.field to another column")


def _extra(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ThinpipeError(f"{what} needs the package {module.split('.')[0]}; install thinpipe[hf]") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
