"""The model against transformers and against itself cut in other ways."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import tiny

from thinpipe.config import Config, ThinpipeError, from_dict, read_hf_config
from thinpipe.data import PAD
from thinpipe.generate import pick
from thinpipe.method import Subspace
from thinpipe.model import KVCache, Stage, build_stages
from thinpipe.pipeline import gradient_squares

VOCAB = 60


def config(stages: int = 1, **groups: dict) -> Config:
    groups = {"pipeline": {"stages": stages}} | groups
    return from_dict(tiny(**groups)).check()


def chain(stages: list[Stage], tokens: torch.Tensor) -> torch.Tensor:
    """The stages one after another; between them the casts as autograd knows them, which `codecs.cross` must equal."""
    x = stages[0](None, tokens)
    for before, stage in pairwise(stages):
        x = stage(x.to(before.codec.dtype).to(x.dtype), tokens)  # type: ignore[attr-defined]
    return x


def batch(seed: int = 0, rows: int = 4, context: int = 16) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, context + 1), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", ["none", "subspace"])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_do_not_change_the_model(method: str, tied: bool) -> None:
    losses, gradients = [], []
    for stages in (1, 2, 4, 8):
        cut = build_stages(config(stages, compression={"method": method}, model={"tied": tied}), VOCAB)
        loss = chain(cut, batch())
        loss.backward()
        losses.append(loss.item())
        grads: dict[str, torch.Tensor] = {}
        for stage in cut:
            for name, parameter, _ in stage.roles():
                grads[name] = grads.get(name, 0) + parameter.grad
        gradients.append(grads)
    assert len(set(losses)) == 1
    for grads in gradients[1:]:
        assert grads.keys() == gradients[0].keys()
        assert all(torch.allclose(grads[name], gradients[0][name], rtol=1e-5, atol=1e-8) for name in grads)


@pytest.mark.parametrize("extras", [{}, {"stage_table": "full", "local_loss": 0.3}], ids=["plain", "tables, local losses"])
def test_the_norm_is_the_same_bits_for_any_number_of_stages(extras: dict[str, Any]) -> None:
    """Sums depend on their order: the tally's is the model's, from the last parameter to the first."""
    norms, names = set(), set()
    for stages in (1, 2, 4):
        cut = build_stages(config(stages, compression={"method": "projected", "rank": 8, "segments": 8} | extras), VOCAB)
        chain(cut, batch()).backward()
        norms.add(sum((square for stage in reversed(cut) for square in gradient_squares(stage)), 0.0).hex())
        names.add(tuple(name for stage in cut for name, _, _ in stage.roles()))
        assert all(len(list(stage.roles())) == len(list(stage.parameters())) for stage in cut)
    assert len(norms) == len(names) == 1


def test_dense_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    stage = build_stages(config(compression={"method": "none"}, model={"rope_theta": 5000.0, "norm_eps": 1e-4}), VOCAB, wire="float32")[0]
    spec = stage.spec
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=16, rms_norm_eps=1e-4, rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        )
    )  # fmt: skip
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
    inner = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    inner |= {f"attn.{x}": f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    state = {}
    for name, parameter, _ in stage.roles():
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            names[name] = f"model.layers.{layer}.{inner[rest.removesuffix('.weight')]}.weight"
        state[names[name]] = parameter.detach()
    llama.load_state_dict(state)
    ids = batch()[:, :-1]
    with torch.no_grad():
        ours = stage.logits(stage.run(None, ids), ids)
        theirs = llama(ids).logits
    assert spec.kv_heads == 2 and (ours - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))


def test_the_stream_stays_in_the_subspace_before_the_last_cut() -> None:
    stages = [stage.double() for stage in build_stages(config(8), VOCAB, wire="float64")]
    tokens = batch()
    method = stages[0].method
    assert isinstance(method, Subspace)
    # Every written matrix before the last cut has k columns; behind it, d.
    for stage in stages:
        for name, parameter, _ in stage.roles():
            if name.endswith((".o.weight", ".down.weight")):
                assert parameter.shape[0] == (32 if stage.is_last else 8), name
    x: torch.Tensor | None = None
    for stage in stages[:-1]:
        x = stage(x, tokens)
        assert x.shape == (4, 16, 8)


def test_gradient_over_the_wire_is_G_U() -> None:
    """METHOD.md 3.3: what comes back over the last cut is the full gradient of X times U."""
    stage = build_stages(config(8), VOCAB, wire="float64")[7].double()
    U = stage.method.U_DK  # type: ignore[union-attr]
    c = torch.randn(4, 16, 8, dtype=torch.float64, requires_grad=True)
    seen = []
    original = stage.method.enter

    def enter(c: torch.Tensor, segment: int) -> torch.Tensor:
        x = original(c, segment)
        x.register_hook(lambda g: seen.append(g))
        return x

    stage.method.enter = enter  # type: ignore[method-assign]
    stage(c, batch()).backward()
    assert torch.allclose(c.grad, seen[0] @ U, atol=1e-14)  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [0.0, 0.25, 1.0])
def test_the_trainable_embedding_starts_at_a_multiple_of_E_U(start: float) -> None:
    """METHOD.md 3.1: at 1 the stream begins as E (I + U U^T)."""
    stage = build_stages(config(8, compression={"embedding_start": start}), VOCAB, [0])[0].double()
    U = stage.method.U_DK  # type: ignore[union-attr]
    E = stage.method.static(torch.arange(VOCAB), torch.float64)
    assert torch.allclose(stage.embed.weight, start * E @ U, atol=1e-6)
    x = stage.method.read(stage.embed(torch.arange(VOCAB)), E, 0)
    assert torch.allclose(x, E @ (torch.eye(32, dtype=torch.float64) + start * U @ U.T), atol=1e-5)


def test_k_equal_to_d_spans_everything() -> None:
    stage = build_stages(config(compression={"rank": 32, "segments": 2}), VOCAB)[0]
    assert math.isfinite(chain([stage], batch()).item())
    assert stage.layers["0"].attn.o.weight.shape == (32, 32)


@pytest.mark.parametrize(("method", "table"), [("projected", "full"), ("subspace", 4), ("none", "full")])
def test_local_losses_add_their_gradients_and_nothing_else(method: str, table: int | str) -> None:
    """Against plain autograd of loss + 0.3 (the segments' cross-entropies), each written out from the paths of the model."""
    compression = {"method": method, "stage_table": table, "rank": 8, "segments": 4}
    with_local, without = (
        build_stages(config(compression=compression | {"local_loss": weight}), VOCAB, wire="float64")[0].double() for weight in (0.3, 0.0)
    )
    for stage in (with_local, without):
        for embedding in stage.tables.values():
            torch.nn.init.normal_(embedding.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    tokens = batch(rows=16)
    ids, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    loss = with_local(None, tokens)
    assert loss.item() == without(None, tokens).item()
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter, _ in with_local.roles()}
    with_local.zero_grad()

    stage, total = with_local, torch.zeros((), dtype=torch.float64)
    static, c = stage.method.static(ids, torch.float64), stage.embed(ids)
    for segment, layers in enumerate(stage.layers_of_segments):
        table_module = dict(stage.tables.items()).get(str(segment))
        known = None if static is None else static.clone()
        if table_module is not None:
            rows = table_module(ids)
            known = rows if known is None else known + rows
        s = stage.method.enter(c, segment)
        for i in layers:
            s = stage.layers[str(i)](s, lambda s, segment=segment, known=known: stage.method.read(s, known, segment), stage.rope, None)
        x = stage.method.read(s, known, segment)
        if segment == 3:
            total = total + torch.nn.functional.cross_entropy(stage.head(stage.norm(x)).flatten(0, 1), targets)
            break
        weight = stage.embed.weight if table_module is None else table_module.weight
        if table_module is not None and table_module.lift_DR is not None:
            weight = weight @ table_module.lift_DR.T
        logits = stage.local_norms[str(segment)](x) @ weight.T
        total = total + 0.3 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
        c = stage.method.leave(s, segment)
    total.backward()
    for name, parameter, _ in stage.roles():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("method", ["none", "subspace"])
def test_padding_is_not_counted(method: str) -> None:
    stage = build_stages(config(compression={"method": method}), VOCAB)[0]
    whole = stage(None, batch()[:2])
    padded = stage(None, torch.cat([batch()[:2], torch.full((2, 17), PAD)]))
    assert padded.item() == pytest.approx(whole.item(), rel=1e-6)


def test_initial_loss_is_near_that_of_guessing() -> None:
    for method in ("none", "subspace"):
        for tied in (False, True):
            stage = build_stages(config(compression={"method": method}, model={"tied": tied, "vocab": 300}), VOCAB)[0]
            loss = stage(None, batch(rows=16)).item()
            assert loss < math.log(300) + 1.0, (method, tied, loss)


def test_recomputing_norms_changes_no_gradient() -> None:
    grads = []
    for recompute in (False, True):
        stage = build_stages(config(pipeline={"recompute": recompute}), VOCAB)[0]
        stage(None, batch()).backward()
        grads.append([p.grad for _, p, _ in stage.roles()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("method", ["none", "subspace"])
def test_cached_decoding_equals_the_full_forward(method: str) -> None:
    stage = build_stages(config(compression={"method": method}), VOCAB)[0].double()
    ids = batch()[:, :16]
    full = stage.logits(stage.run(None, ids), ids)
    cache, parts = KVCache(), []
    for piece in ids.split([5, 1, 4, 1, 5], dim=1):
        parts.append(stage.logits(stage.run(None, piece, cache), piece))
    assert torch.allclose(torch.cat(parts, dim=1), full, atol=1e-12)


def test_sampling_keeps_to_the_nucleus() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    assert pick(logits, 0.0, 1.0, None).tolist() == [1]
    assert {int(pick(logits, 1.0, 0.5, generator)) for _ in range(50)} == {1}
    assert {int(pick(logits, 1.0, 0.9, generator)) for _ in range(200)} == {1, 2}
    drawn = torch.tensor([int(pick(logits, 1.0, 1.0, generator)) for _ in range(4000)]).bincount(minlength=4) / 4000
    assert torch.allclose(drawn, logits[0].softmax(0), atol=0.03)


def test_weights_are_a_function_of_seed_and_name() -> None:
    one, other = build_stages(config(1), VOCAB)[0], build_stages(config(4), VOCAB)[2]
    weights = {name: parameter for name, parameter, _ in one.roles()}
    assert all(torch.equal(parameter, weights[name]) for name, parameter, _ in other.roles())
    assert not torch.equal(weights["head.weight"], dict(build_stages(config(run={"seed": 1}), VOCAB)[0].named_parameters())["head.weight"])


HF = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 16, "vocab_size": 300, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True), ("mlp_bias", True), ("rope_scaling", {"type": "linear", "factor": 2.0}), ("head_dim", 16),
        ("sliding_window", 4096), ("hidden_act", "gelu"), ("model_type", "mistral"), ("rope_parameters", {"rope_type": "llama3"}),
        ("hidden_size", "32"),
    ],
)  # fmt: skip
def test_hf_config_refuses_what_is_not_implemented(tmp_path, field: str, value: object) -> None:
    import json

    path = tmp_path / "config.json"
    path.write_text(json.dumps(HF))
    assert read_hf_config(path)["kv_heads"] == 2
    path.write_text(json.dumps(HF | {field: value}))
    with pytest.raises(ThinpipeError, match=field):
        read_hf_config(path)
