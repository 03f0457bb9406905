"""What all stages learn of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Tally:
    """One small message down the pipeline and one up.

    Fields add up over the stages. The last stage's gradients are finished first, so the running sums travel down behind the
    last gradients; the first stage knows the total at once, and it travels up ahead of the next step's first activation.

    Attributes:
        square_norm: of the gradients, averaged over replicas.
        loss: of the batch; wire_forward, wire_backward: bytes over boundaries; average_bytes: sent to other replicas.
        stop: stages that were asked to stop; written, failed: those whose checkpoint is.
        energy: share of the gradient's energy inside the subspace.
        torn: stages that lost another replica while they averaged; in the total, whether all must average anew.
        epoch: set in the total when who takes part changes: the number of what holds from now on (replicas.py).
    """

    square_norm: float = 0.0
    loss: float = 0.0
    wire_forward: float = 0.0
    wire_backward: float = 0.0
    average_bytes: float = 0.0
    stop: float = 0.0
    written: float = 0.0
    failed: float = 0.0
    energy: float = 0.0
    torn: float = 0.0
    epoch: float = 0.0

    @property
    def norm(self) -> float:
        """Global gradient norm; NaN where a gradient is."""
        return math.sqrt(self.square_norm) if self.square_norm >= 0 else math.nan

    def tensor(self) -> torch.Tensor:
        return torch.tensor(list(vars(self).values()), dtype=torch.float64)

    @staticmethod
    def of(tensor: torch.Tensor) -> Tally:
        return Tally(*tensor.tolist())
