"""Optimizers by role: row-constant AdamW for what lives in the subspace, torch's AdamW and Muon for the rest.

Legend: K rank, D stream width, T_KK the transport of coordinates into a new basis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .config import OptimConfig, TrainConfig
from .method import Role


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


class RowConstantAdamW(torch.optim.Optimizer):
    """`row_constant_adamw` as a torch optimizer; each group has its `coordinates` dimension."""

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float, width: int) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0, "coordinates": 0, "width": width})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "coordinates", "width")}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p.select(group["coordinates"], 0).unsqueeze(group["coordinates"]))
                state["step"] += 1
                row_constant_adamw(p, p.grad, state["exp_avg"], state["exp_avg_sq"], int(state["step"]), **options)


FIRST_MOMENTS = ("exp_avg", "momentum_buffer")  # they live in the parameter's own coordinates


class Optimizer:
    """Every parameter of a stage under the optimizer that its role asks for.

    Args:
        parameters: name, parameter and role (`Stage.roles`).
        width: D, the model's width.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter, Role]], config: OptimConfig, width: int) -> None:
        self.config = config
        self.named = {name: (parameter, role) for name, parameter, role in parameters}
        groups: dict[str, dict[tuple[float, int | None], dict[str, Any]]] = {"muon": {}, "row-constant": {}, "adamw": {}}
        for parameter, role in self.named.values():
            decay = config.weight_decay if role.kind in ("hidden", "head") else 0.0
            group = groups[self._kind(role)].setdefault((decay, role.coordinates), {"params": [], "weight_decay": decay})
            group["params"].append(parameter)
            if self._kind(role) == "row-constant":
                group["coordinates"] = role.coordinates
        made: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
            "muon": lambda g: torch.optim.Muon(g, lr=0.0, adjust_lr_fn="match_rms_adamw"),
            "row-constant": lambda g: RowConstantAdamW(g, config.betas, config.eps, width),
            "adamw": lambda g: torch.optim.AdamW(g, lr=0.0, betas=config.betas, eps=config.eps, fused=True),
        }
        self._parts = {kind: make(list(groups[kind].values())) for kind, make in made.items() if groups[kind]}

    def _kind(self, role: Role) -> str:
        if role.kind == "hidden" and self.config.hidden == "muon":
            return "muon"
        return "adamw" if role.coordinates is None else "row-constant"

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter, _ in self.named.values()]

    def step(self, lr: float, scale: float = 1.0) -> None:
        """One step at learning rate `lr` with all gradients times `scale` (the global clip)."""
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], scale)
        for part in self._parts.values():
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Moments and step counts as "parameter name/key" to tensor (not copied)."""
        return {
            f"{name}/{key}": value
            for name, (parameter, role) in self.named.items()
            for key, value in self._parts[self._kind(role)].state[parameter].items()
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state()` of a run with the same parameters gave."""
        for full, value in state.items():
            name, key = full.rsplit("/", 1)
            parameter, role = self.named[name]
            # Step counts stay in host memory, as torch keeps them.
            self._parts[self._kind(role)].state[parameter][key] = (
                value.clone() if value.dim() == 0 else value.to(parameter.device, copy=True)
            )

    @torch.no_grad()
    def transport(self, T_KK: torch.Tensor) -> None:
        """Express coordinates and their first moments in a new basis: A <- A T (METHOD.md section 3).

        Row-constant second moments don't depend on the basis.
        """
        for parameter, role in self.named.values():
            if role.coordinates is None:
                continue
            state = self._parts[self._kind(role)].state[parameter]
            moments = [state[key] for key in FIRST_MOMENTS if key in state]
            for tensor in (parameter, *moments):
                T = T_KK.to(tensor.device)
                wide = tensor.double()
                tensor.copy_(wide @ T if role.coordinates == 1 else T.T @ wide)


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
