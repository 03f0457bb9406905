"""Optimizers against literal transcriptions and torch.optim, in float64."""

import copy
from typing import Any

import pytest
import torch
from conftest import tiny

from thinpipe import optim, subspace
from thinpipe.config import Config, OptimConfig, TrainConfig, from_dict
from thinpipe.method import Role, Subspace
from thinpipe.model import Stage, build_stages
from thinpipe.optim import Optimizer, clip_scale, learning_rate

LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1
VOCAB = 50


def config(method: str, **compression: Any) -> Config:
    groups = {"compression": {"method": method, "rank": 6, "segments": 2, **compression}, "model": {"layers": 3, "vocab": VOCAB}}
    return from_dict(tiny(**groups)).check()


def build(method: str, **compression: Any) -> Stage:
    return build_stages(config(method, **compression), VOCAB, wire="float64")[0].double()


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 17), generator=torch.Generator().manual_seed(step))


class LiteralAdamW:
    """Protocol Models' row-constant AdamW on a full-space matrix W (rows, d), written down as METHOD.md section 3 states it."""

    def __init__(self, W: torch.Tensor) -> None:
        self.m, self.v, self.t = torch.zeros_like(W), torch.zeros(W.shape[0], 1, dtype=W.dtype), 0

    def update(self, W: torch.Tensor, g: torch.Tensor, U: torch.Tensor, decay: float) -> torch.Tensor:
        g = g @ U @ U.T  # the projected gradient
        self.t += 1
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * (g**2).mean(dim=1, keepdim=True)
        m_hat = self.m / (1 - BETAS[0] ** self.t)
        v_hat = self.v / (1 - BETAS[1] ** self.t)
        return W - LR * decay * W - LR * m_hat / (v_hat.sqrt() + EPS)


def literal_training(steps: int) -> dict[str, torch.Tensor]:
    """A plain full-width Llama whose writing matrices before the last cut and whose embedding are kept in S by projection."""
    ours = build("subspace")
    method = ours.method
    assert isinstance(method, Subspace)
    U = method.U_DK
    plain = build("none")
    roles = {name: role for name, _, role in ours.roles()}
    weights = dict(ours.named_parameters())
    static = method.table(torch.arange(VOCAB), torch.float64)
    with torch.no_grad():
        for name, parameter, _ in plain.roles():
            full = method.full_writer(weights[name]) if roles[name].coordinates == 0 else weights[name]
            parameter.copy_(static + weights[name] @ U.T if name == "embed.weight" else full)
    literal: dict[str, LiteralAdamW] = {}
    free_decayed, free = [], []
    for name, parameter, role in plain.roles():
        if roles[name].coordinates is not None:
            literal[name] = LiteralAdamW(parameter.detach() if name == "embed.weight" else parameter.detach().T)
        else:
            (free if role.kind == "gain" else free_decayed).append(parameter)
    others = torch.optim.AdamW(
        [{"params": free_decayed, "weight_decay": DECAY}, {"params": free, "weight_decay": 0.0}], lr=LR, betas=BETAS, eps=EPS, foreach=False
    )
    for step in range(steps):
        plain.zero_grad()
        plain(None, tokens(step)).backward()
        others.step()
        with torch.no_grad():
            for name, parameter, _ in plain.roles():
                if name not in literal:
                    continue
                if name == "embed.weight":  # T_S = table - E, no decay
                    parameter.copy_(static + literal[name].update(parameter - static, parameter.grad, U, 0.0))
                else:  # nn.Linear stores W transposed
                    parameter.copy_(literal[name].update(parameter.T, parameter.grad.T, U, DECAY).T)
    return {name: parameter.detach() for name, parameter, _ in plain.roles()}


def coordinates_training(steps: int, lr: float = LR, width: int | None = None) -> dict[str, torch.Tensor]:
    stage = build("subspace")
    options = OptimConfig(lr=lr, betas=BETAS, eps=EPS, weight_decay=DECAY)
    optimizer = Optimizer(stage.roles(), options, width or stage.spec.width)
    for step in range(steps):
        optimizer.zero_grad()
        stage(None, tokens(step)).backward()
        optimizer.step(lr)
    full = {}
    for name, parameter, role in stage.roles():
        if name == "embed.weight":
            full[name] = stage.method.full_embedding(parameter.detach())
        else:
            full[name] = stage.method.full_writer(parameter.detach()) if role.coordinates == 0 else parameter.detach()
    return full


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in a)


def test_coordinates_equal_the_literal_full_space_method(monkeypatch: pytest.MonkeyPatch) -> None:
    # A basis stored in float32 is orthonormal to 1e-7 only; the literal projection g U U^T wants it in float64.
    original = Stage.double

    def double(stage: Stage) -> Stage:
        stage = original(stage)
        if isinstance(stage.method, Subspace):
            stage.method.U_DK.copy_(subspace.initial_basis(stage.spec.width, stage.method.rank, 0))
        return stage

    monkeypatch.setattr(Stage, "double", double)
    literal = literal_training(20)
    assert worst(coordinates_training(20), literal) < 1e-10
    # The traps: v divided by k instead of d, and a learning rate scaled to make up for it twice.
    assert worst(coordinates_training(20, width=6), literal) > 1e-3
    assert worst(coordinates_training(20, lr=LR * (32 / 6) ** 0.5), literal) > 1e-3


@pytest.mark.parametrize("hidden", ["adamw", "muon"])
def test_free_parameters_equal_torch(hidden: str) -> None:
    ours = build("none")
    theirs = copy.deepcopy(ours)
    options = OptimConfig(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, hidden=hidden)  # type: ignore[arg-type]
    optimizer = Optimizer(ours.roles(), options, 32)
    kinds = {name: role.kind for name, _, role in theirs.roles()}
    named = {name: parameter for name, parameter, _ in theirs.roles()}
    muon = [p for n, p in named.items() if kinds[n] == "hidden"] if hidden == "muon" else []
    decayed = [p for n, p in named.items() if kinds[n] in ("hidden", "head") and not any(p is q for q in muon)]
    plain = [p for n, p in named.items() if kinds[n] in ("gain", "embedding")]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    reference: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, foreach=False)]
    if muon:
        reference.append(torch.optim.Muon(muon, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"))
    for step in range(5):
        for model in (ours, theirs):
            model.zero_grad()
            model(None, tokens(step)).backward()
        optimizer.step(LR)
        for part in reference:
            part.step()
    for name, parameter, _ in ours.roles():
        assert torch.allclose(parameter, named[name], rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("hidden", ["adamw", "muon"])
def test_a_move_within_the_same_span_changes_nothing(hidden: str) -> None:
    """Loss and the following 20 steps are the same in every orthonormal basis of S."""
    losses = []
    for turned in (False, True):
        stage = build("subspace")
        optimizer = Optimizer(stage.roles(), OptimConfig(lr=LR, hidden=hidden), stage.spec.width)  # type: ignore[arg-type]
        run = []
        for step in range(25):
            if turned and step == 5:
                old = stage.method.U_DK.clone()
                turn = subspace.orthonormal(torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
                stage.method.U_DK.copy_(old @ turn)
                optimizer.transport(subspace.transport(subspace.orthonormal(old), subspace.orthonormal(stage.method.U_DK)))
            optimizer.zero_grad()
            loss = stage(None, tokens(step))
            loss.backward()
            run.append(loss.item())
            optimizer.step(LR)
        losses.append(run)
    # Muon's Newton-Schulz iteration runs in bfloat16, whatever the parameters are.
    assert losses[1] == pytest.approx(losses[0], rel=1e-6 if hidden == "adamw" else 2e-2)


def test_state_goes_out_and_in() -> None:
    first, second = build("subspace"), build("subspace")
    a, b = (Optimizer(stage.roles(), OptimConfig(hidden="muon"), 32) for stage in (first, second))
    for step in range(3):
        a.zero_grad()
        first(None, tokens(step)).backward()
        a.step(LR)
    second.load_state_dict(first.state_dict())
    b.load({name: value.clone() for name, value in a.state().items()})
    for stage, optimizer in ((first, a), (second, b)):
        optimizer.zero_grad()
        stage(None, tokens(9)).backward()
        optimizer.step(LR)
    for (name, p, _), (_, q, _) in zip(first.roles(), second.roles(), strict=True):
        assert torch.equal(p, q), name


def test_every_parameter_has_one_optimizer() -> None:
    for method in ("none", "subspace"):
        for hidden in ("adamw", "muon"):
            stage = build(method)
            optimizer = Optimizer(stage.roles(), OptimConfig(hidden=hidden), 32)  # type: ignore[arg-type]
            held = [p for group in optimizer._groups for _, p in group.members]
            assert {id(p) for p in held} == {id(p) for p in stage.parameters()} and len(held) == len({id(p) for p in held})


def test_learning_rate() -> None:
    train, options = TrainConfig(steps=100), OptimConfig(lr=1.0, warmup=10, decay="linear")
    assert [learning_rate(options, train, step) for step in (0, 4, 9, 10, 55)] == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5])
    assert learning_rate(options, train, 99) == pytest.approx(1 / 90)
    cosine = OptimConfig(lr=1.0, warmup=10, decay="cosine")
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), T_max=90)
    for step in range(10, 100):
        assert learning_rate(cosine, train, step) == pytest.approx(reference.get_last_lr()[0])
        reference.optimizer.step()
        reference.step()
    assert learning_rate(OptimConfig(lr=1.0, warmup=0, decay="none"), train, 99) == 1.0


def test_clip_equals_torch() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(3))]
    for p in parameters:
        p.grad = torch.full_like(p, 2.0)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    assert float(parameters[0].grad[0]) == pytest.approx(2.0 * clip_scale(norm, 1.0))  # type: ignore[index]
    assert clip_scale(0.5, 1.0) == 1.0 and clip_scale(5.0, 0.0) == 1.0


def test_row_constant_state_is_one_number_per_row() -> None:
    for shape, coordinates in (((6, 20), 0), ((50, 6), 1)):
        parameter = torch.nn.Parameter(torch.zeros(shape))
        optimizer = Optimizer([("p", parameter, Role("hidden", coordinates))], OptimConfig(), 32)
        parameter.grad = torch.ones(shape)
        optimizer.step(1e-3)
        expected = [shape[0], shape[1]]
        expected[coordinates] = 1
        assert list(optimizer.state()["p/exp_avg_sq"].shape) == expected
    assert optim.FIRST_MOMENTS == ("exp_avg", "momentum_buffer")
