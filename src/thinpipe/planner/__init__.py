"""What a run will cost, before it starts: seconds, bytes, memory, by simulating the schedule's own action lists; no torch.

`plan(config, vocab, links, gpu)` predicts a config, `suggest` looks for a better one, `best_schedule` resolves
schedule = "auto", `simulate` and `bound` take costs of any origin. docs/planner.md says how, and how well.
"""

from .costs import GPU, GPUS, UTILISATION, Costs, average_bytes, calibrate, costs_by_formula, find_gpu
from .counts import Memory, message_bytes, parameters, stage_memory, stage_sizes, tied_bytes_per_step, wire_bytes, wire_bytes_per_token
from .draw import draw_timeline, draw_widths, square_cube
from .order import Recommendation, balance, chain, recommend
from .planning import Plan, Suggestion, at_least_possible, in_flight_limits, memory_by_stage, plan, suggest, what_binds
from .search import Choice, best_schedule, bound
from .simulation import Row, Timeline, simulate

__all__ = [
    "GPU",
    "GPUS",
    "UTILISATION",
    "Choice",
    "Costs",
    "Memory",
    "Plan",
    "Recommendation",
    "Row",
    "Suggestion",
    "Timeline",
    "at_least_possible",
    "average_bytes",
    "balance",
    "best_schedule",
    "bound",
    "calibrate",
    "chain",
    "costs_by_formula",
    "draw_timeline",
    "draw_widths",
    "find_gpu",
    "in_flight_limits",
    "memory_by_stage",
    "message_bytes",
    "parameters",
    "plan",
    "recommend",
    "simulate",
    "square_cube",
    "stage_memory",
    "stage_sizes",
    "suggest",
    "tied_bytes_per_step",
    "what_binds",
    "wire_bytes",
    "wire_bytes_per_token",
]
