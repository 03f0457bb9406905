"""Sizes of a model: presets, and a Hugging Face Llama's config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ThinpipeError, check_type


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The resolved size of a model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    vocab: int
    tied: bool
    rope_theta: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def _spec(width: int, layers: int, heads: int, kv_heads: int, hidden: int, context: int, **more: Any) -> dict[str, Any]:
    defaults = {"tied": False, "rope_theta": 10000.0, "norm_eps": 1e-5}
    sizes = {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads, "hidden": hidden}
    return defaults | sizes | {"context": context} | more


PRESETS: dict[str, dict[str, Any]] = {
    "demo": _spec(96, 4, 3, 3, 256, 128),
    "small": _spec(256, 8, 4, 4, 704, 256),
    "medium": _spec(512, 8, 8, 8, 1408, 512),
    "llama-160m": _spec(768, 12, 12, 12, 2048, 1024),
    "llama-1b": _spec(2048, 16, 32, 8, 8192, 1024, rope_theta=500000.0),
    "llama-8b": _spec(4096, 32, 32, 8, 14336, 1024, rope_theta=500000.0),
}

# Fields of a Hugging Face Llama config: ours, or the only value that we implement.
_HF_SIZES = {
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "hidden",
    "max_position_embeddings": "context",
    "vocab_size": "vocab",
    "tie_word_embeddings": "tied",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
}
_HF_ONLY = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "pretraining_tp": (1,),
}


def read_hf_config(path: str | Path, field: str = "model.hf_config") -> dict[str, Any]:
    """Sizes of a Hugging Face Llama config.json under our names; `field` names it in errors.

    Raises ThinpipeError that names the field when the file asks for something the model does not implement.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ThinpipeError(f"{field} = {str(path)!r} can't be read: {error.strerror}; give the config.json of a Llama model") from None
    except (ValueError, RecursionError) as error:
        raise ThinpipeError(f"{field} = {str(path)!r} isn't JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ThinpipeError(f"{field} = {str(path)!r} isn't a JSON object; give a model's config.json")
    rope = raw.pop("rope_parameters", None) or {}
    if not isinstance(rope, dict):
        raise ThinpipeError(f"{path}: rope_parameters = {rope!r} is not implemented; only an object of rope_type and rope_theta is")
    if rope.get("rope_type", "default") != "default":
        raise ThinpipeError(f"{path}: rope_parameters.rope_type = {rope['rope_type']!r} is not implemented; only 'default' is")
    raw.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
    raw.setdefault("model_type", None)
    for name, allowed in _HF_ONLY.items():
        if name in raw and raw[name] not in allowed:
            raise ThinpipeError(f"{path}: {name} = {raw[name]!r} is not implemented; only {allowed[0]!r} is")
    raw.setdefault("num_key_value_heads", raw.get("num_attention_heads"))
    raw.setdefault("tie_word_embeddings", False)
    raw.setdefault("rms_norm_eps", 1e-6)
    missing = [name for name in _HF_SIZES if raw.get(name) is None]
    if missing:
        raise ThinpipeError(f"{path}: {missing[0]} is missing; give the config.json of a Llama model")
    for theirs, ours in _HF_SIZES.items():
        check_type(raw[theirs], {"tied": bool, "rope_theta": float, "norm_eps": float}.get(ours, int), f"{path}: {theirs}")
        if ours not in ("tied", "rope_theta", "norm_eps") and raw[theirs] < 1:
            raise ThinpipeError(f"{path}: {theirs} = {raw[theirs]} is too small; it must be at least 1")
    sizes = {ours: raw[theirs] for theirs, ours in _HF_SIZES.items()}
    if raw.get("head_dim") not in (None, sizes["width"] // max(1, sizes["heads"])):
        raise ThinpipeError(f"{path}: head_dim = {raw['head_dim']} is not implemented; only hidden_size / num_attention_heads is")
    return sizes
