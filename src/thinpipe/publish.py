"""`thinpipe export`: a run as a Hugging Face folder that stock transformers loads, checked before it gets its name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer

from .codecs import Cast
from .config import ModelSpec, ThinpipeError
from .data import end_of_text_id
from .export import INDEX, WEIGHTS, Tensors, llama_config, read_llama_folder, to_llama
from .inference import Loaded, load_run
from .method import Dense
from .model import Stage

SHARD_BYTES = 4 * 10**9
TOLERANCE = 1e-5  # of float32 logits, relative to the largest or to 1

# How tokenizers call what our data has no need of.
_SPECIAL = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"),
}


def export_run(
    run: Path, out: Path, dtype: Literal["float32", "bfloat16"] = "float32", *, shard_bytes: int = SHARD_BYTES
) -> dict[str, Any]:
    """Write a run's newest checkpoint as a plain Llama: config, weights with index, tokenizer, generation config, card.

    The folder is written beside `out`, loaded again (by transformers where it is installed), its logits compared with
    the run's on random ids, and only then renamed.

    Args:
        out: a new or empty folder.
        dtype: of the written weights.
        shard_bytes: largest size of a weights file; a larger tensor has a file of its own.

    Returns:
        `out`, `dtype`, `step`, `parameters` (of the plain Llama), `files` (names), `tokenizer` (whether the run had one);
        `max_abs_logit_diff`: largest difference between the folder's logits, in float32 by `checked_with`, and the run's in
        float32 without wire rounding, whose largest is `max_abs_logit`;
        `rounding_max_abs_logit_diff`: what the run's wire rounding at its cuts changes, which a plain Llama has not (not judged).

    Raises:
        ThinpipeError: no run there, `out` in use or not writable, its method is not a plain
            Llama, or float32 logits differ by more than TOLERANCE; then nothing is left at `out`.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ThinpipeError(f"dtype = {dtype!r} can't be exported; use 'float32' or 'bfloat16'")
    if out.exists() and (not out.is_dir() or any(out.iterdir()) or out.samefile(".")):  # whoever works in a folder would keep the old one
        raise ThinpipeError(f"{out} is already there and not an empty folder to spare; name a new one")
    loaded = load_run(run)
    what = f"compression.method = {loaded.config.compression.method!r}" if not loaded.stage.method.is_plain_llama else ""
    what = what or (f"compression.stage_table = {loaded.config.compression.stage_table!r}" if loaded.stage.tables else "")
    if what:
        raise ThinpipeError(f"{what} is not a plain Llama and can't be exported; methods 'none' and 'subspace' without tables can")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        told = _write_checked(partial, loaded, dtype, shard_bytes)
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise ThinpipeError(f"{out} can't be written: {error}; name a folder that can be written and has room") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {"out": str(out), **told}


def _write_checked(folder: Path, run: Loaded, dtype: str, shard_bytes: int) -> dict[str, Any]:
    stage = run.stage
    tensors = to_llama(plain_tensors(stage, getattr(torch, dtype)), stage.spec)
    _write_weights(folder, tensors, shard_bytes)
    _write_texts(folder, _settings(stage.spec, run.tokenizer, dtype))
    checked = _compare(stage, folder, _sample_ids(stage.spec))
    allowed = TOLERANCE * max(1.0, checked["max_abs_logit"])
    if dtype == "float32" and not checked["max_abs_logit_diff"] <= allowed:  # so that NaN fails too
        raise ThinpipeError(
            f"the exported model's logits differ from the run's by {checked['max_abs_logit_diff']:.3g} (allowed: {allowed:.3g}), "
            f"computed with {checked['checked_with']}; nothing was written\nThis is a mistake of thinpipe's; please report it."
        )
    parameters = sum(tensor.numel() for tensor in tensors.values())
    _write_texts(folder, {"README.md": _card(run, parameters, dtype, checked)})
    files = sorted(path.name for path in folder.iterdir())
    return {"dtype": dtype, "step": run.step, "parameters": parameters, "files": files, "tokenizer": run.tokenizer is not None, **checked}


@torch.no_grad()
def plain_tensors(stage: Stage, dtype: torch.dtype) -> Tensors:
    """The whole model's parameters at full width under our names: what `to_llama` takes.

    Where the method holds coordinates, W = A U^T and the embedding E + A_T U^T (METHOD.md section 3) are computed in
    float64 and then rounded to `dtype`.
    """
    tensors = {}
    for name, parameter, role in stage.roles():
        weight = parameter.detach()
        if role.kind == "embedding":
            weight = stage.method.full_embedding(weight.double())
        elif role.coordinates is not None:
            weight = stage.method.full_writer(weight.double())
        tensors[name] = weight.to(dtype)
    return tensors


# --- files ------------------------------------------------------------------------------------------------------------------------------


def _write_weights(folder: Path, tensors: Tensors, shard_bytes: int) -> None:
    """Safetensors files of at most `shard_bytes` each, and the index that says which tensor is where."""
    shards: list[Tensors] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors 0.8 makes it private, whatever the umask
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_texts(folder, {INDEX: _json({"metadata": {"total_size": total}, "weight_map": weight_map})})


def _write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _settings(spec: ModelSpec, tokenizer: Tokenizer | None, dtype: str) -> dict[str, str]:
    """Everything but weights and card, by file name."""
    texts: dict[str, str] = {}
    ids: dict[str, int | None] = {"bos": None, "eos": None, "pad": None}
    if tokenizer is not None:
        special = _special_tokens(tokenizer, end_of_text_id(tokenizer))
        ids |= {kind.removesuffix("_token"): tokenizer.token_to_id(name) for kind, name in special.items()}
        stored = json.loads(tokenizer.to_str())
        if tokenizer.num_special_tokens_to_add(False):
            stored["post_processor"] = None  # it would add tokens that the model has never seen at the start of a text
        texts["tokenizer.json"] = _json(stored)
        texts["tokenizer_config.json"] = _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": spec.context,
                "clean_up_tokenization_spaces": False,  # else decode would change spaces before punctuation
                **special,
            }
        )
    texts["config.json"] = _json(llama_config(spec, dtype, **ids))
    texts["generation_config.json"] = _json({f"{kind}_token_id": id for kind, id in ids.items()})
    return texts


def _special_tokens(tokenizer: Tokenizer, end_of_text: int | None) -> dict[str, str]:
    """Those that the tokenizer has, by transformers' name for them."""
    special: dict[str, str] = {}
    for kind, names in _SPECIAL.items():
        if (found := next((name for name in names if tokenizer.token_to_id(name) is not None), None)) is not None:
            special[kind] = found
    if end_of_text is not None and (token := tokenizer.id_to_token(end_of_text)) is not None:
        special["eos_token"] = token
    return special


def _card(run: Loaded, parameters: int, dtype: str, checked: Mapping[str, Any]) -> str:
    config, spec, tokens = run.config, run.stage.spec, run.sequences * run.stage.spec.context
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [thinpipe]
---

# {config.run.name}

A Llama of {parameters:,} parameters ({spec.layers} layers of width {spec.width}, context {spec.context}), trained by thinpipe
with method "{config.compression.method}" for {run.step:,} steps, {tokens:,} tokens. It is a plain Llama: nothing of thinpipe's is needed
to run it.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("this folder")
tokenizer = AutoTokenizer.from_pretrained("this folder")
```

Weights are {dtype}. Computed in float32 with {checked["checked_with"]}, logits differ from those of the trained model by at most
{checked["max_abs_logit_diff"]:.2e}; the largest logit is {checked["max_abs_logit"]:.2f}.
"""


# --- the check --------------------------------------------------------------------------------------------------------------------------


def _sample_ids(spec: ModelSpec) -> torch.Tensor:
    """Two sequences (2, T) of random ids: they reach rows that text seldom does, and need no corpus."""
    return torch.randint(spec.vocab, (2, spec.context), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _logits(stage: Stage, ids_BT: torch.Tensor) -> torch.Tensor:
    return stage.logits(stage.run(None, ids_BT), ids_BT)


def _compare(stage: Stage, folder: Path, ids_BT: torch.Tensor) -> dict[str, Any]:
    """What `export_run` returns about logits; leaves `stage` without wire rounding."""
    rounded_BTV = _logits(stage, ids_BT)
    stage.codec = Cast(torch.float32, stage.method.wire_width)
    ours_BTV = _logits(stage, ids_BT)
    written_BTV, checked_with = _logits_of_folder(folder, ids_BT)
    return {
        "max_abs_logit_diff": float((written_BTV - ours_BTV).abs().max()),
        "max_abs_logit": float(ours_BTV.abs().max()),
        "rounding_max_abs_logit_diff": float((rounded_BTV - ours_BTV).abs().max()),
        "checked_with": checked_with,
    }


@torch.no_grad()
def _logits_of_folder(folder: Path, ids_BT: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Logits of a written folder in float32, and who computed them."""
    try:
        import transformers
    except ImportError:
        sizes, tensors = read_llama_folder(folder)
        spec = ModelSpec(**sizes)
        plain = Stage(spec, Dense(spec), [0], [range(spec.layers)], Cast(torch.float32, spec.width), batch_tokens=1)
        for name, parameter, _ in plain.roles():
            parameter.copy_(tensors[name])
        return _logits(plain, ids_BT), "thinpipe (transformers is not installed)"
    model = transformers.LlamaForCausalLM.from_pretrained(folder, local_files_only=True).float().eval()
    return model(ids_BT, use_cache=False).logits, f"transformers {transformers.__version__}"
