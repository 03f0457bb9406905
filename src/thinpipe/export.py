"""Our parameter names and Hugging Face's, dict to dict; and what a Hugging Face Llama folder holds.

The layouts agree: weights are (out, in), query heads of one group stand together, RoPE is half-split. So a tensor that
goes over changes its name and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .config import ModelSpec, ThinpipeError, read_hf_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

Tensors = dict[str, torch.Tensor]
_Table = dict[str, tuple[str, tuple[int, ...]]]  # name -> name on the other side, shape


def _parameters(spec: ModelSpec) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Our name, Hugging Face's name and the shape of every parameter, in the model's order."""
    width, kv, hidden = spec.width, spec.kv_heads * spec.head_dim, spec.hidden
    block = {
        "attn_norm": ("input_layernorm", (width,)),
        "attn.q": ("self_attn.q_proj", (width, width)),
        "attn.k": ("self_attn.k_proj", (kv, width)),
        "attn.v": ("self_attn.v_proj", (kv, width)),
        "attn.o": ("self_attn.o_proj", (width, width)),
        "mlp_norm": ("post_attention_layernorm", (width,)),
        "mlp.gate": ("mlp.gate_proj", (hidden, width)),
        "mlp.up": ("mlp.up_proj", (hidden, width)),
        "mlp.down": ("mlp.down_proj", (width, hidden)),
    }
    yield "embed.weight", "model.embed_tokens.weight", (spec.vocab, width)
    for i in range(spec.layers):
        for ours, (theirs, shape) in block.items():
            yield f"layers.{i}.{ours}.weight", f"model.layers.{i}.{theirs}.weight", shape
    yield "norm.weight", "model.norm.weight", (width,)
    if not spec.tied:
        yield "head.weight", "lm_head.weight", (spec.vocab, width)


def to_llama(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> Tensors:
    """The state dict of Hugging Face's LlamaForCausalLM from a plain model under our names; a tied head has no entry.

    Args:
        tensors: every parameter at full width (methods materialise theirs first), of any floating type.

    Raises:
        ThinpipeError: a tensor is missing, unknown or of another shape.
    """
    table = {ours: (theirs, shape) for ours, theirs, shape in _parameters(spec)}
    _check_names(tensors, table)
    return _renamed(tensors, table)


def from_llama(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> Tensors:
    """The inverse of `to_llama`: our names from the state dict of a LlamaForCausalLM, the tensors as they are.

    Raises:
        ThinpipeError: a tensor is missing, unknown, quantised or of another shape, or a tied model has a head of its own.
    """
    table = {theirs: (ours, shape) for ours, theirs, shape in _parameters(spec)}
    kept = {name: tensor for name, tensor in tensors.items() if not _derived(name, spec)}
    _check_names(kept, table)
    _check_tied(tensors, spec)
    return _renamed(kept, table)


def _derived(name: str, spec: ModelSpec) -> bool:
    """Whether older files hold this though it follows from the rest: RoPE's frequencies, a copy of a tied table."""
    return name.endswith(".rotary_emb.inv_freq") or (spec.tied and name == "lm_head.weight")


def _check_names(given: Collection[str], wanted: Collection[str]) -> None:
    missing, extra = [n for n in wanted if n not in given], [n for n in given if n not in wanted]
    if missing:
        raise ThinpipeError(f"{missing[0]} is missing ({len(missing)} of {len(wanted)} are); give all tensors of a Llama of these sizes")
    if extra:
        raise ThinpipeError(f"{extra[0]} is not a tensor of a plain Llama of these sizes ({len(extra)} are not); give one without it")


def _check_tied(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> None:
    if spec.tied and "lm_head.weight" in tensors and not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
        raise ThinpipeError("lm_head.weight differs from the embedding though the head is tied; set tie_word_embeddings to false")


def _renamed(tensors: Mapping[str, torch.Tensor], table: _Table) -> Tensors:
    renamed = {}
    for name, (other, shape) in table.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ThinpipeError(f"{name} has shape {list(tensor.shape)} but a Llama of these sizes wants {list(shape)}; correct the sizes")
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ThinpipeError(f"{name} is of type {str(tensor.dtype).removeprefix('torch.')}; give a model that is not quantised")
        renamed[other] = tensor
    return renamed


def llama_config(
    spec: ModelSpec, dtype: str = "float32", *, bos: int | None = None, eos: int | None = None, pad: int | None = None
) -> dict[str, Any]:
    """config.json of a Hugging Face Llama of these sizes, for transformers 5 and before.

    Args:
        dtype: of the weights, "float32" or "bfloat16".
        bos, eos, pad: ids of the tokenizer. They are written even if None: a LlamaConfig left alone takes 1 and 2.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "intermediate_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,  # where versions before 5 look
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": dtype,  # the name that all versions read
    }


def read_llama_folder(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """Sizes (the fields of ModelSpec) and tensors, under our names, of a Hugging Face Llama folder.

    The weights are one safetensors file or several with an index. Tensors keep their type and lie in host memory.

    Raises:
        ThinpipeError: the folder or a file can't be read, holds pickles only, or is not a plain Llama.
    """
    sizes = _sizes(folder)
    files = _files(folder)
    with _named(folder):
        return sizes, from_llama(_read(folder, files, files), ModelSpec(**sizes))


def initial_from_llama(folder: Path, names: Collection[str], spec: ModelSpec) -> Tensors:
    """What one stage takes from a Hugging Face Llama folder: float32 tensors by our names. Nothing else is read from disk.

    Args:
        names: the stage's parameters, e.g. "layers.3.attn.q.weight"; what a Llama has not (a segment's table) is left out.
        spec: the run's model; it may differ from the folder's in `context` only.

    Raises:
        ThinpipeError: as `read_llama_folder`, or a size of the run is not the folder's (both are named).
    """
    sizes = _sizes(folder)
    for field, value in dataclasses.asdict(spec).items():
        if field != "context" and sizes[field] != value:
            raise ThinpipeError(f"{folder}: model.{field} is {sizes[field]} there and {value} in this run; leave model.{field} out")
    table = {theirs: (ours, shape) for ours, theirs, shape in _parameters(spec)}
    files = _files(folder)
    with _named(folder):
        _check_names([name for name in files if not _derived(name, spec)], table)
        table = {name: (ours, shape) for name, (ours, shape) in table.items() if ours in names}
        tied = {"lm_head.weight"} & files.keys() if spec.tied and "model.embed_tokens.weight" in table else set()
        tensors = _read(folder, files, [*table, *tied])
        if tied:
            _check_tied(tensors, spec)
        return {name: tensor.float() for name, tensor in _renamed(tensors, table).items()}


@contextlib.contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Errors about tensors gain the folder they come from."""
    try:
        yield
    except ThinpipeError as error:
        raise ThinpipeError(f"{folder}: {error}") from None


def _sizes(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ThinpipeError(f"{folder} holds no config.json; give the folder of a Hugging Face Llama")
    return read_hf_config(folder / "config.json")


def _files(folder: Path) -> dict[str, str]:
    """The file that holds each tensor."""
    if (folder / WEIGHTS).exists():
        with _opened(folder / WEIGHTS) as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    if not (folder / INDEX).exists():
        pickles = sorted(path.name for suffix in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{suffix}"))
        if pickles:
            raise ThinpipeError(f"{folder / pickles[0]} is a pickle, which can run code and is not read; save the model as safetensors")
        raise ThinpipeError(f"{folder} holds neither {WEIGHTS} nor {INDEX}; give the folder of a Hugging Face Llama")
    try:
        files = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if any(Path(file).name != file for file in files.values()):
            raise ValueError("a file outside the folder")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ThinpipeError(f"{folder / INDEX} can't be used ({error}); copy the folder again") from None
    return files


def _read(folder: Path, files: Mapping[str, str], names: Collection[str]) -> Tensors:
    by_file = defaultdict(list)
    for name in names:
        by_file[files[name]].append(name)
    tensors: Tensors = {}
    for file_name, members in by_file.items():
        with _opened(folder / file_name) as file:
            tensors |= {name: file.get_tensor(name) for name in members}
    return tensors


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ThinpipeError(f"{path.name} can't be read ({error}); copy {path} again") from None
