"""Order of compute and communication: valid for every shape, and what the names promise."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe import schedule


def run(lists: list[list[schedule.Action]]) -> None:
    """Interpret the lists as the runtime does; fails on a deadlock or a use before its receive."""
    done: set[tuple[int, str, int]] = set()
    at = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(lists):
            while at[stage] < len(actions):
                kind, m = actions[at[stage]]
                if kind == "forward" and stage > 0:
                    assert (stage, "recv_forward", m) in done, "computes before it asked for its input"
                    if (stage - 1, "send_forward", m) not in done:
                        break
                if kind == "backward":
                    assert (stage, "forward", m) in done
                    if stage < len(lists) - 1:
                        assert (stage, "recv_backward", m) in done
                        if (stage + 1, "send_backward", m) not in done:
                            break
                done.add((stage, kind, m))
                at[stage] += 1
                moved = True
    assert at == [len(actions) for actions in lists], "deadlock"


@given(st.sampled_from(["gpipe", "1f1b", "wan"]), st.integers(1, 9), st.integers(1, 12), st.data())
def test_every_schedule_runs_to_its_end(name: str, stages: int, micro_batches: int, data: st.DataObject) -> None:
    warmup = data.draw(st.none() | st.integers(min(stages, micro_batches), 4 * micro_batches)) if name == "wan" else None
    lists = schedule.actions(name, stages, micro_batches, warmup)
    run(lists)
    for stage, actions in enumerate(lists):
        counts = Counter(kind for kind, _ in actions)
        assert counts["forward"] == counts["backward"] == micro_batches
        assert counts["recv_forward"] == counts["send_backward"] == (micro_batches if stage > 0 else 0)
        assert counts["recv_backward"] == counts["send_forward"] == (micro_batches if stage < stages - 1 else 0)
        assert len(set(actions)) == len(actions)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_in_flight_activations_are_what_the_names_promise(stages: int) -> None:
    held = {name: [schedule.in_flight(a) for a in schedule.actions(name, stages, 16)] for name in ("gpipe", "1f1b", "wan")}
    assert held["gpipe"] == [16] * stages  # FIELD.md kind 15: grows with the micro-batches
    assert held["1f1b"] == [stages - stage for stage in range(stages)]
    assert held["wan"][0] == 16 and held["wan"][-1] == 1
    assert held["wan"] == sorted(held["wan"], reverse=True)


def test_wan_with_warmup_of_the_stages_is_1f1b_with_early_receives() -> None:
    for ours, theirs in zip(schedule.actions("wan", 4, 8, warmup=4), schedule.actions("1f1b", 4, 8), strict=True):
        compute = [action for action in ours if action.kind in ("forward", "backward")]
        assert compute == [action for action in theirs if action.kind in ("forward", "backward")]
        receives = [action.kind.startswith("recv") for action in ours]
        assert receives == sorted(receives, reverse=True), "every receive stands before the first compute"


def test_depth_falls_evenly_and_never_below_1f1b() -> None:
    def depths(stages: int, micro_batches: int, warmup: int) -> list[int]:
        return [schedule.warmup_of_stage(stage, stages, micro_batches, warmup) for stage in range(stages)]

    assert depths(4, 8, 8) == [8, 6, 4, 1]  # 1 + 7 (3 - stage) / 3, rounded up
    assert depths(4, 8, 4) == [4, 3, 2, 1]
    assert depths(4, 12, 27) == [12, 12, 10, 1]  # beyond the micro-batches: the first stages run all forwards first
    assert depths(1, 4, 4) == [1]


def test_forward_only() -> None:
    lists = schedule.forwards(3, 4)
    run(lists)
    assert all(action.kind.endswith("forward") for actions in lists for action in actions)
