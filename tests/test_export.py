"""Export against transformers: logits, greedy text, tokenizer; the way back; refusals.

Every parameter is random, gains too, so that a tensor in the wrong place shows.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from conftest import tiny
from safetensors.torch import load_file, save_file
from torch import nn

from thinpipe import inference, publish, subspace
from thinpipe.checkpoint import Checkpoint
from thinpipe.config import Config, ModelSpec, ThinpipeError, from_dict
from thinpipe.data import prepare
from thinpipe.export import from_llama, initial_from_llama, llama_config, read_llama_folder, to_llama
from thinpipe.generate import generate
from thinpipe.inference import load_run
from thinpipe.method import Lossy, Subspace
from thinpipe.model import Stage, build_stages
from thinpipe.publish import export_run, plain_tensors
from thinpipe.run import open_run
from thinpipe.topology import connect
from thinpipe.trainer import Trainer

transformers = pytest.importorskip("transformers")

VOCAB = 300
MODEL = {"width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 64, "context": 32}
METHODS = {
    "dense": {"method": "none"},
    "gaussian": {"method": "subspace", "rank": 8, "static": "gaussian", "static_scale": 0.7},
    "factored": {"method": "subspace", "rank": 8, "static": "factored", "static_scale": 0.7},
}


def config_of(method: str, segments: int, data: dict[str, Any] | None = None, **model: Any) -> Config:
    compression = METHODS[method] | {"segments": segments, "wire": "float32"}
    train, pipeline = {"steps": 3, "batch": 4, "eval_every": 0, "eval_batches": 1}, {"micro_batches": 2}
    groups = tiny(model=MODEL | model, compression=compression, data=data or {}, train=train, pipeline=pipeline)
    return from_dict(groups).check()


@torch.no_grad()
def randomise(stage: Stage, seed: int = 0) -> Stage:
    """Every parameter and the basis drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter, role in stage.roles():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * (parameter.shape[1] ** -0.5 if role.kind in ("hidden", "head") else 1.0))
    if isinstance(stage.method, Subspace):
        stage.method.U_DK.copy_(subspace.orthonormal(torch.randn(stage.method.U_DK.shape, generator=generator)))
    return stage


def random_stage(config: Config, seed: int = 0) -> Stage:
    (stage,) = build_stages(config, VOCAB, wire="float32")
    return randomise(stage, seed)


@torch.no_grad()
def logits(stage: Stage, ids_BT: torch.Tensor) -> torch.Tensor:
    return stage.logits(stage.run(None, ids_BT), ids_BT)


def random_ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))


def llama(tensors: dict[str, torch.Tensor], spec: ModelSpec, dtype: torch.dtype, attention: str) -> Any:
    """Stock LlamaForCausalLM from the two dicts that `export` makes."""
    settings = transformers.LlamaConfig(**llama_config(spec), attn_implementation=attention)
    model = transformers.LlamaForCausalLM(settings).to(dtype).eval()
    told = model.load_state_dict(tensors, strict=False)
    assert not told.unexpected_keys
    assert told.missing_keys == (["lm_head.weight"] if spec.tied else [])
    model.tie_weights()
    return model


class Float64Norm(nn.Module):
    """LlamaRMSNorm's formula in the input's type: the original computes in float32 whatever it is given."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.weight * (x_BTD * torch.rsqrt(x_BTD.pow(2).mean(-1, keepdim=True) + self.eps))


def with_float64_norms(model: Any) -> Any:
    for layer in model.model.layers:
        layer.input_layernorm = Float64Norm(layer.input_layernorm)
        layer.post_attention_layernorm = Float64Norm(layer.post_attention_layernorm)
    model.model.norm = Float64Norm(model.model.norm)
    return model


# --- one function, two programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_logits_equal_those_of_transformers(kv_heads: int, tied: bool, method: str, segments: int) -> None:
    config = config_of(method, segments, kv_heads=kv_heads, tied=tied, rope_theta=3000.0, norm_eps=1e-3)
    stage = random_stage(config)
    ids = random_ids(2, 32)

    model = llama(to_llama(plain_tensors(stage, torch.float32), stage.spec), stage.spec, torch.float32, "eager")
    ours = logits(stage, ids)
    with torch.no_grad():
        theirs = model(ids).logits
    assert (ours - theirs).abs().max() <= 1e-5 * max(1.0, float(ours.abs().max()))

    # sdpa: eager attention casts its softmax to float32
    (stage,) = build_stages(config, VOCAB, wire="float64")
    randomise(stage).double()
    model = llama(to_llama(plain_tensors(stage, torch.float64), stage.spec), stage.spec, torch.float64, "sdpa")
    ours = logits(stage, ids)
    with torch.no_grad():
        theirs = with_float64_norms(model)(ids).logits
    assert ours.abs().max() > 1
    assert (ours - theirs).abs().max() <= 1e-10


@pytest.mark.parametrize(("method", "tied", "kv_heads"), [("dense", False, 2), ("gaussian", True, 4), ("factored", False, 2)])
def test_greedy_text_equals_that_of_transformers(method: str, tied: bool, kv_heads: int) -> None:
    stage = random_stage(config_of(method, 3, kv_heads=kv_heads, tied=tied, context=256))
    model = llama(to_llama(plain_tensors(stage, torch.float32), stage.spec), stage.spec, torch.float32, "eager")
    prompt = random_ids(1, 12)
    with connect(30.0) as alone:
        ours = [int(ids) for ids in generate(stage, alone, prompt, 200)]
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=200, pad_token_id=0)
    with torch.no_grad():
        best = model(theirs).logits[0, prompt.shape[1] - 1 : -1].topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-4, "no test: the two likeliest ids are as good as equal somewhere"
    assert len(set(ours)) > 20
    assert ours == theirs[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_is_bit_equal(tied: bool) -> None:
    stage = random_stage(config_of("dense", 3, tied=tied))
    ours = {name: parameter.detach() for name, parameter, _ in stage.roles()}
    back = from_llama(to_llama(ours, stage.spec), stage.spec)
    assert list(back) == list(ours)
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def test_only_constrained_writers_are_materialised() -> None:
    stage = random_stage(config_of("gaussian", 3))
    tensors = plain_tensors(stage, torch.float64)
    parameters = {name: parameter for name, parameter, _ in stage.roles()}
    U_DK = stage.method.U_DK.double()  # type: ignore[operator, union-attr]
    changed = {name for name, tensor in tensors.items() if tensor.shape != parameters[name].shape}
    assert changed == {"embed.weight", *(f"layers.{i}.{m}.weight" for i in (0, 1) for m in ("attn.o", "mlp.down"))}
    assert torch.equal(tensors["layers.1.mlp.down.weight"], U_DK @ parameters["layers.1.mlp.down.weight"].double())


# --- names and shapes -------------------------------------------------------------------------------------------------------------------


def test_wrong_tensors_are_named() -> None:
    stage = random_stage(config_of("dense", 1))
    ours = plain_tensors(stage, torch.float32)
    theirs = to_llama(ours, stage.spec)
    with pytest.raises(ThinpipeError, match=r"^norm\.weight is missing"):
        to_llama({name: tensor for name, tensor in ours.items() if name != "norm.weight"}, stage.spec)
    with pytest.raises(ThinpipeError, match=r"^layers\.7\.odd is not a tensor"):
        to_llama(ours | {"layers.7.odd": torch.zeros(1)}, stage.spec)
    with pytest.raises(ThinpipeError, match=r"^layers\.0\.attn\.k\.weight has shape \[32, 32\] .* wants \[16, 32\]"):
        to_llama(ours | {"layers.0.attn.k.weight": torch.zeros(32, 32)}, stage.spec)
    with pytest.raises(ThinpipeError, match=r"^model\.layers\.2\.self_attn\.v_proj\.weight is of type int8"):
        from_llama(theirs | {"model.layers.2.self_attn.v_proj.weight": torch.zeros(16, 32, dtype=torch.int8)}, stage.spec)
    with pytest.raises(ThinpipeError, match=r"^lm_head\.weight differs"):
        from_llama(theirs, dataclasses.replace(stage.spec, tied=True))
    copied = theirs | {"lm_head.weight": theirs["model.embed_tokens.weight"], "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert "head.weight" not in from_llama(copied, dataclasses.replace(stage.spec, tied=True))


# --- whole runs and folders -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Train a few steps; returns the run's folder, the same for the same arguments."""
    base = tmp_path_factory.mktemp("runs")
    for i in range(12):
        (base / f"{i}.txt").write_text("".join(f"def function_{i}_{j}(x):\n    return x * {i + j} + {j % 7}\n" for j in range(12)))

    @functools.cache
    def make(method: str, *, wire: str = "bfloat16", tokenizer: str | None = None, **model: Any) -> Path:
        data = {"files": [str(base / "*.txt")], "vocab": VOCAB, "cache": str(base / "cache")}
        config = config_of(method, 3, data | ({"tokenizer": tokenizer} if tokenizer else {}), **model)
        compression = dataclasses.replace(config.compression, wire=wire, move_every=2)
        run = dataclasses.replace(config.run, dir=str(base / f"run-{len(list(base.glob('run-*')))}"))
        config, folder, _ = open_run(dataclasses.replace(config, compression=compression, run=run))
        with connect(30.0) as alone:
            Trainer(config, alone, folder).fit()
        torch.set_num_threads(1)
        return folder

    return make


@pytest.mark.parametrize(("method", "tied"), [("dense", True), ("factored", False)])
def test_a_run_becomes_a_folder_that_transformers_loads(method: str, tied: bool, make_run: Callable[..., Path], tmp_path: Path) -> None:
    run, out = make_run(method, tied=tied), tmp_path / "hf"
    result = export_run(run, out)
    assert result["out"] == str(out)
    assert result["max_abs_logit_diff"] <= 1e-5 * max(1.0, result["max_abs_logit"])
    assert 0 < result["rounding_max_abs_logit_diff"] < 0.1 * result["max_abs_logit"]  # the run's wire is bfloat16
    assert result["checked_with"] == f"transformers {transformers.__version__}"
    assert (result["dtype"], result["step"], result["tokenizer"]) == ("float32", 3, True)
    assert set(result["files"]) == {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(result["files"])
    assert str(tmp_path) not in "".join(path.read_text() for path in out.iterdir() if path.suffix in (".json", ".md"))
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]

    loaded = load_run(run)
    config, stage = loaded.config, loaded.stage
    stage.codec = dataclasses.replace(stage.codec, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(model) is transformers.LlamaForCausalLM
    assert model.dtype == torch.float32
    assert model.num_parameters() == result["parameters"]
    ids = random_ids(3, 32)
    with torch.no_grad():
        assert (model(ids).logits - logits(stage, ids)).abs().max() <= 1e-5 * max(1.0, result["max_abs_logit"])

    data = prepare(config)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == data.end_of_text
    assert model.config.bos_token_id is model.config.pad_token_id is None
    text = "def function_3(x):\n\treturn  x * 3 ,  'naïve' <|endoftext|> ?"
    for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        tokenizer = kind.from_pretrained(out)
        assert tokenizer(text)["input_ids"] == data.encode(text)
        assert tokenizer.decode(data.encode(text)) == text
        assert tokenizer.eos_token_id == data.end_of_text

    sizes, tensors = read_llama_folder(out)
    assert ModelSpec(**sizes) == stage.spec
    expected = plain_tensors(stage, torch.float32)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_the_card_counts_what_all_replicas_trained_on(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, original = make_run("dense", tied=True), inference.find
    facts: dict[str, Any] = {}

    def find(*arguments: Any) -> Checkpoint | None:
        found = original(*arguments)
        return found and dataclasses.replace(found, facts={key: found.facts[key] for key in ("vocab", "data", "config")} | facts)

    monkeypatch.setattr(inference, "find", find)
    assert load_run(run).sequences == 12  # as older versions wrote it
    facts["sequences"] = 10  # one of two replicas was away for a step
    export_run(run, tmp_path / "hf")
    assert "for 3 steps, 320 tokens" in (tmp_path / "hf/README.md").read_text()


def test_bfloat16_reports_its_difference(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run("factored", tied=False)
    result = export_run(run, tmp_path / "bf16", "bfloat16")
    assert 1e-5 < result["max_abs_logit_diff"] / result["max_abs_logit"] < 0.05
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert model.dtype == torch.bfloat16
    tensors = load_file(tmp_path / "bf16" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    with pytest.raises(ThinpipeError, match=r"'float16' can't be exported; use 'float32' or 'bfloat16'"):
        export_run(run, tmp_path / "fp16", "float16")  # type: ignore[arg-type]


def test_without_transformers_the_folder_is_checked_by_our_own_dense_model(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("gaussian", tied=True, wire="float32")
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = export_run(run, tmp_path / "hf")
    assert result["checked_with"] == "thinpipe (transformers is not installed)"
    assert result["rounding_max_abs_logit_diff"] == 0
    assert result["max_abs_logit_diff"] <= 1e-5 * max(1.0, result["max_abs_logit"])


def test_shards_and_reading_of_one_stage(make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("dense", tied=True)
    result = export_run(run, tmp_path / "hf", shard_bytes=20_000)
    shards = [name for name in result["files"] if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    # a larger tensor, here the embedding, has a file of its own
    assert all(
        len(held) == 1 or sum(t.nbytes for t in held.values()) <= 20_000 for held in (load_file(tmp_path / "hf" / s) for s in shards)
    )
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * result["parameters"]

    stage = load_run(run).stage
    ours = {name: parameter.detach() for name, parameter, _ in stage.roles()}
    wanted = ["layers.1.attn.q.weight", "layers.1.attn_norm.weight"]
    for name in set(shards) - {index["weight_map"][f"model.layers.1.{n}.weight"] for n in ("self_attn.q_proj", "input_layernorm")}:
        (tmp_path / "hf" / name).unlink()  # other stages' files are not needed
    read = initial_from_llama(tmp_path / "hf", wanted, dataclasses.replace(stage.spec, context=16))
    assert list(read) == ["layers.1.attn_norm.weight", "layers.1.attn.q.weight"]
    assert all(torch.equal(read[name], ours[name]) for name in wanted)
    with pytest.raises(ThinpipeError, match="can't be read"):
        read_llama_folder(tmp_path / "hf")
    with pytest.raises(ThinpipeError, match=r"model\.heads is 4 there and 2 in this run; leave model\.heads out"):
        initial_from_llama(tmp_path / "hf", wanted, dataclasses.replace(stage.spec, heads=2))


def test_folders_of_others_are_read_or_refused(tmp_path: Path) -> None:
    """A folder written by transformers itself (sharded, bfloat16), then damaged in turn."""
    settings = transformers.LlamaConfig(**llama_config(random_stage(config_of("dense", 1)).spec))
    theirs = transformers.LlamaForCausalLM(settings).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    sizes, tensors = read_llama_folder(tmp_path)
    assert tensors["layers.2.mlp.up.weight"].dtype == torch.bfloat16
    taken = initial_from_llama(tmp_path, ["head.weight"], ModelSpec(**sizes))["head.weight"]
    assert taken.dtype == torch.float32
    assert torch.equal(taken, theirs.lm_head.weight.float())

    tied = dataclasses.replace(ModelSpec(**sizes), tied=True)
    (tmp_path / "config.json").write_text(json.dumps(llama_config(tied)))
    assert initial_from_llama(tmp_path, ["norm.weight"], tied).keys() == {"norm.weight"}
    with pytest.raises(ThinpipeError, match=r"lm_head\.weight differs"):
        initial_from_llama(tmp_path, ["embed.weight"], tied)
    theirs.config.save_pretrained(tmp_path)

    index = tmp_path / "model.safetensors.index.json"
    kept = index.read_text()
    index.write_text(kept.replace("model-00001", "../model-00001"))
    with pytest.raises(ThinpipeError, match=r"index\.json can't be used \(a file outside the folder\)"):
        read_llama_folder(tmp_path)
    index.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ThinpipeError, match=r"pytorch_model\.bin is a pickle"):
        read_llama_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ThinpipeError, match=r"holds neither model\.safetensors nor"):
        read_llama_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ThinpipeError, match=r"model\.safetensors can't be read"):
        read_llama_folder(tmp_path)
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ThinpipeError, match=r"model\.embed_tokens\.weight is missing"):
        initial_from_llama(tmp_path, ["norm.weight"], ModelSpec(**sizes))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ThinpipeError, match=r"holds no config\.json"):
        read_llama_folder(tmp_path)


def test_a_tokenizer_that_adds_tokens_is_exported_as_the_model_saw_it(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Llama's own tokenizers put <s> first; training never did, so the exported tokenizer doesn't."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["def function(x): return x"] * 3, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    run = make_run("dense", tokenizer=str(tmp_path / "tokenizer.json"), vocab=VOCAB)
    export_run(run, tmp_path / "hf")
    config = load_run(run).config
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def function_3(x):\n    return x , </s>"
    assert tokenizer.encode(text).ids[0] == 1
    assert exported(text)["input_ids"] == prepare(config).encode(text)
    assert exported.decode(exported(text)["input_ids"]) == text
    assert (exported.bos_token_id, exported.eos_token_id, exported.pad_token_id) == (1, 2, 3)
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (1, 2, 3)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ThinpipeError, match="holds no run"):
        export_run(tmp_path / "nothing", tmp_path / "hf")
    run = make_run("dense", tied=True)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ThinpipeError, match="is already there and not an empty folder"):
        export_run(run, run)
    (tmp_path / "file").touch()
    with pytest.raises(ThinpipeError, match="can't be written"):
        export_run(run, tmp_path / "file" / "hf")
    (tmp_path / "file").unlink()

    loaded = load_run(run)
    loaded.stage.method = Lossy(loaded.stage.spec)
    lossy = dataclasses.replace(loaded.config.compression, method="topk")
    loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, compression=lossy))
    with monkeypatch.context() as patched:
        patched.setattr(publish, "load_run", lambda folder: loaded)
        with pytest.raises(
            ThinpipeError, match=r"method = 'topk' is not a plain Llama .*; methods 'none' and 'subspace' without tables can"
        ):
            export_run(run, tmp_path / "hf")
    with monkeypatch.context() as patched:  # a swapped pair of tensors must not leave the house
        honest = publish.to_llama

        def swapped(tensors: dict[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
            gate, up = "layers.1.mlp.gate.weight", "layers.1.mlp.up.weight"
            return honest(tensors | {gate: tensors[up], up: tensors[gate]}, spec)

        patched.setattr(publish, "to_llama", swapped)
        with pytest.raises(ThinpipeError, match="logits differ from the run's by"):
            export_run(run, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    (tmp_path / "hf").mkdir()  # an empty folder will do
    assert export_run(run, tmp_path / "hf")["max_abs_logit_diff"] < 1e-4
