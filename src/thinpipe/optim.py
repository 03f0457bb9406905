"""Optimizers by role: row-constant AdamW for what lives in the subspace, torch's AdamW and Muon for the rest.

Legend: K rank, D stream width, T_KK the transport of coordinates into a new basis.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim.adamw import adamw

from .config import OptimConfig, TrainConfig
from .method import Role

Rule = Literal["adamw", "row-constant", "muon"]


def row_constant_adamw(
    p: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    coordinates: int,
    width: int,
) -> None:
    """One AdamW step, in place, in coordinates of the subspace (METHOD.md section 3; Protocol Models' optimizer).

    The full-space second moment is v_i = mean_j g_ij^2 over the D entries of row i of W = A U^T. Of these D directions only K
    are not empty, hence sum over the coordinates divided by D, not by K. The step is the same in every orthonormal basis.

    Args:
        p, g, m: parameter, gradient and first moment, any shape.
        v: second moment, one number per row: p's shape with 1 along `coordinates`.
        step: number of this step, from 1.
        eps: added outside the root.
        weight_decay: decoupled, times lr.
        coordinates: the dimension of p that runs over the K coordinates.
        width: D.
    """
    m.lerp_(g, 1 - betas[0])
    v.lerp_(g.square().sum(dim=coordinates, keepdim=True) / width, 1 - betas[1])
    root = (v / (1 - betas[1] ** step)).sqrt_().add_(eps)
    p.mul_(1 - lr * weight_decay)
    p.addcdiv_(m, root, value=-lr / (1 - betas[0] ** step))


FIRST_MOMENTS = ("exp_avg", "momentum_buffer")  # they live in the parameter's own coordinates


@dataclass(frozen=True)
class _Group:
    """Parameters that share a rule, a weight decay and, in the subspace, the dimension of their coordinates."""

    rule: Rule
    weight_decay: float
    coordinates: int | None
    members: list[tuple[str, nn.Parameter]]


class Optimizer:
    """Every parameter of a stage under the rule that its role asks for.

    AdamW is torch's function, not its class: making a torch.optim.Optimizer imports torch's compiler, two seconds of every start.

    Args:
        parameters: name, parameter and role (`Stage.roles`).
        width: D, the model's width.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter, Role]], config: OptimConfig, width: int) -> None:
        self.config, self.width = config, width
        self.named = {name: (parameter, role) for name, parameter, role in parameters}
        groups: dict[tuple[Rule, float, int | None], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, (parameter, role) in self.named.items():
            decay = config.weight_decay if role.kind in ("hidden", "head") else 0.0
            groups[self._rule(role), decay, role.coordinates].append((name, parameter))
        self._groups = [_Group(*key, members) for key, members in groups.items()]
        self._state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.named}
        muon = [{"params": [p for _, p in g.members], "weight_decay": g.weight_decay} for g in self._groups if g.rule == "muon"]
        self._muon = torch.optim.Muon(muon, lr=0.0, adjust_lr_fn="match_rms_adamw") if muon else None

    def _rule(self, role: Role) -> Rule:
        if role.kind == "hidden" and self.config.hidden == "muon":
            return "muon"
        return "adamw" if role.coordinates is None else "row-constant"

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter, _ in self.named.values()]

    @torch.no_grad()
    def step(self, lr: float, scale: float = 1.0) -> None:
        """One step at learning rate `lr` with all gradients times `scale` (the global clip)."""
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], scale)
        for group in self._groups:
            if group.rule == "adamw":
                self._adamw(group, lr)
            elif group.rule == "row-constant":
                self._row_constant(group, lr)
        if self._muon is not None:
            for options in self._muon.param_groups:
                options["lr"] = lr
            self._muon.step()

    def _adamw(self, group: _Group, lr: float) -> None:
        members = [(p, p.grad, self._moments(name, p, p)) for name, p in group.members if p.grad is not None]
        if not members:
            return
        states = [state for *_, state in members]
        adamw(
            [p for p, *_ in members],
            [grad for _, grad, _ in members],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            lr=lr,
            weight_decay=group.weight_decay,
            eps=self.config.eps,
            maximize=False,
        )

    def _row_constant(self, group: _Group, lr: float) -> None:
        assert group.coordinates is not None
        for name, p in group.members:
            if p.grad is None:
                continue
            state = self._moments(name, p, p.select(group.coordinates, 0).unsqueeze(group.coordinates))
            state["step"] += 1
            row_constant_adamw(
                p,
                p.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                int(state["step"]),
                lr=lr,
                betas=self.config.betas,
                eps=self.config.eps,
                weight_decay=group.weight_decay,
                coordinates=group.coordinates,
                width=self.width,
            )

    def _moments(self, name: str, parameter: torch.Tensor, second_like: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self._state[name]
        if not state:
            state["step"] = torch.zeros((), device=self._counts_on(name))
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(second_like)
        return state

    def _counts_on(self, name: str) -> torch.device:
        """Torch's fused AdamW counts steps beside the parameter; whoever reads the count wants it in host memory."""
        parameter, role = self.named[name]
        return parameter.device if self._rule(role) == "adamw" else torch.device("cpu")

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _of(self, name: str) -> dict[str, torch.Tensor]:
        parameter, role = self.named[name]
        return self._muon.state[parameter] if self._muon is not None and self._rule(role) == "muon" else self._state[name]

    def state(self) -> dict[str, torch.Tensor]:
        """Moments and step counts as "parameter name/key" to tensor (not copied)."""
        return {f"{name}/{key}": value for name in self.named for key, value in self._of(name).items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state()` of a run with the same parameters gave."""
        for full, value in state.items():
            name, key = full.rsplit("/", 1)
            device = self._counts_on(name) if key == "step" else self.named[name][0].device
            self._of(name)[key] = value.to(device, copy=True)

    @torch.no_grad()
    def transport(self, T_KK: torch.Tensor) -> None:
        """Express coordinates and their first moments in a new basis: A <- A T (METHOD.md section 3).

        Row-constant second moments don't depend on the basis.
        """
        for name, (parameter, _) in self.named.items():
            state = self._of(name)
            for tensor in (parameter, *(state[key] for key in FIRST_MOMENTS if key in state)):
                self.turn(name, tensor, T_KK)

    @torch.no_grad()
    def turn(self, name: str, tensor: torch.Tensor, T_KK: torch.Tensor) -> None:
        """Express a tensor that is laid out like the parameter of that name in the new basis, in place, if it has coordinates."""
        coordinates = self.named[name][1].coordinates
        if coordinates is not None:
            T, wide = T_KK.to(tensor.device), tensor.double()
            tensor.copy_(wide @ T if coordinates == 1 else T.T @ wide)


def learning_rate(optim: OptimConfig, train: TrainConfig, step: int) -> float:
    """Learning rate of `step` (from 0): linear warm-up, then linear or cosine decay to zero at train.steps."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    left = (train.steps - step) / max(1, train.steps - optim.warmup)
    if optim.decay == "none":
        return optim.lr
    return optim.lr * (left if optim.decay == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))


def clip_scale(norm: float, clip: float) -> float:
    """Factor on all gradients for a global norm of at most `clip` (0: none); torch's clip_grad_norm_ formula."""
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0
