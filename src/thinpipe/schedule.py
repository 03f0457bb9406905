"""In which order a stage computes and communicates, as plain tuples; no torch.

A schedule is one list of actions per stage. `forward` and `backward` compute a micro-batch, the others start a
transfer and return at once; a compute action waits for the transfer that it needs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "recv_forward", "recv_backward", "send_forward", "send_backward"]


class Action(NamedTuple):
    kind: Kind
    micro_batch: int


def warmup_of_stage(stage: int, stages: int, micro_batches: int, warmup: int) -> int:
    """Forwards that `stage` runs before its first backward when the first stage runs `warmup`.

    The last stage turns round at once; between the two the depth falls evenly, never below 1F1B's `stages - stage`,
    so that what is in flight covers the links' delay (warmup = stages is 1F1B, warmup = micro_batches covers most).
    """
    if stage == stages - 1:
        return 1
    depth = 1 - (1 - warmup) * (stages - 1 - stage) // (stages - 1)  # rounded up
    return min(micro_batches, max(stages - stage, depth))


def compute_order(stage: int, micro_batches: int, warmup: int) -> list[Action]:
    """`warmup` forwards, then one backward and one forward in turn, then the remaining backwards."""
    order = [Action("forward", m) for m in range(warmup)]
    for m in range(micro_batches):
        order.append(Action("backward", m))
        if warmup + m < micro_batches:
            order.append(Action("forward", warmup + m))
    return order


def actions(name: str, stages: int, micro_batches: int, warmup: int | None = None) -> list[list[Action]]:
    """The action list of every stage.

    Args:
        name: "gpipe" (all forwards, then all backwards) and "1f1b" post each receive just before its use, as torch's own
            schedules do. "wan" posts every receive when the step begins (Gloo moves no byte before the receive is
            posted) and alternates like 1F1B after a deeper warm-up.
        warmup: forwards of the first stage before its first backward, "wan" only (None: all micro-batches).
    """
    lists = []
    for stage in range(stages):
        if name == "gpipe":
            depth = micro_batches
        elif name == "1f1b":
            depth = min(micro_batches, stages - stage)
        else:
            assert name == "wan", name
            depth = warmup_of_stage(stage, stages, micro_batches, warmup or micro_batches)
        lists.append(_with_transfers(compute_order(stage, micro_batches, depth), stage, stages, early=name == "wan"))
    return lists


def _with_transfers(order: list[Action], stage: int, stages: int, early: bool) -> list[Action]:
    first, last = stage == 0, stage == stages - 1

    def receives(action: Action) -> list[Action]:
        if action.kind == "forward":
            return [] if first else [Action("recv_forward", action.micro_batch)]
        return [] if last else [Action("recv_backward", action.micro_batch)]

    out = [receive for action in order for receive in receives(action)] if early else []
    for action in order:
        if not early:
            out += receives(action)
        out.append(action)
        if action.kind == "forward" and not last:
            out.append(Action("send_forward", action.micro_batch))
        if action.kind == "backward" and not first:
            out.append(Action("send_backward", action.micro_batch))
    return out


def forwards(stages: int, micro_batches: int) -> list[list[Action]]:
    """Forward passes only (validation), every receive posted early."""
    orders = [[Action("forward", m) for m in range(micro_batches)] for _ in range(stages)]
    return [_with_transfers(order, stage, stages, early=True) for stage, order in enumerate(orders)]


def in_flight(stage_actions: list[Action]) -> int:
    """Largest number of micro-batches whose activations the stage holds at once."""
    held = peak = 0
    for action in stage_actions:
        held += (action.kind == "forward") - (action.kind == "backward")
        peak = max(peak, held)
    return peak
