"""One-stage pipelines: shapes, precision, padding."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import tiny

from thinpipe.config import Config, from_dict
from thinpipe.data import PAD
from thinpipe.model import build_stages
from thinpipe.optim import Optimizer
from thinpipe.pipeline import Pipeline
from thinpipe.tally import Tally
from thinpipe.topology import connect

VOCAB = 400


def config(**groups: dict) -> Config:
    return from_dict(tiny(**groups)).check()


def batch(rows: int = 16, columns: int = 17) -> torch.Tensor:
    return torch.randint(256, VOCAB, (rows, columns), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(15, 17), (16, 16), (16, 18), (8, 17)])
def test_a_batch_of_another_shape_is_refused_before_anything_is_sent(shape: tuple[int, int]) -> None:
    """FIELD.md kind 2: a message of another size than the posted buffer would abort the receiving process."""
    c = config()
    with connect(10) as alone:
        pipeline = Pipeline(build_stages(c, VOCAB)[0], alone, c.pipeline, c.micro_batch)
        with pytest.raises(AssertionError, match="batch of shape"):
            pipeline.step(batch(*shape))
        assert math.isfinite(pipeline.step(batch()))


def test_a_short_last_batch_counts_its_own_tokens_only() -> None:
    """FIELD.md kind 2: padded rows and a mean over the tokens that there are."""
    c = config()
    with connect(10) as alone:
        pipeline = Pipeline(build_stages(c, VOCAB)[0], alone, c.pipeline, c.micro_batch)
        tokens = batch()
        short = tokens[:5].clone()
        padded = torch.cat([short, torch.full((11, 17), PAD)])
        by_hand = sum(pipeline.evaluate([torch.cat([row[None], torch.full((15, 17), PAD)])]) for row in short) / 5
        assert pipeline.evaluate([padded]) == pytest.approx(by_hand, rel=1e-6)
        both = (pipeline.evaluate([tokens]) * 16 + by_hand * 5) / 21
        assert pipeline.evaluate([tokens, padded]) == pytest.approx(both, rel=1e-6)


def test_bf16_keeps_parameters_norms_and_moments_in_float32() -> None:
    """FIELD.md kind 6."""
    c = config()
    stage = build_stages(c, VOCAB)[0]
    stage.bf16 = True
    with connect(10) as alone:
        pipeline = Pipeline(stage, alone, c.pipeline, c.micro_batch)
        optimizer = Optimizer(stage.roles(), c.optim, stage.spec.width)
        rough = pipeline.step(batch())
        norm = math.sqrt(pipeline.tally(Tally(loss=rough)).square_norm)
        by_hand = math.sqrt(sum(float(p.grad.double().square().sum()) for p in stage.parameters() if p.grad is not None))
        assert norm == pytest.approx(by_hand, rel=1e-12)
        optimizer.step(1e-3)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in stage.parameters())
        assert all(tensor.dtype == torch.float32 for tensor in optimizer.state().values())
        stage.bf16 = False
        stage_32 = build_stages(c, VOCAB)[0]
        exact = Pipeline(stage_32, alone, c.pipeline, c.micro_batch).step(batch())
    assert rough == pytest.approx(exact, rel=1e-2) and rough != exact


def test_the_gradient_is_that_of_the_mean_over_the_batch() -> None:
    c = config(compression={"method": "none", "wire": "float32"})
    stage, whole = build_stages(c, VOCAB)[0].double(), build_stages(c, VOCAB)[0].double()
    stage.codec = whole.codec = replace(stage.codec, dtype=torch.float64)
    tokens = batch()
    with connect(10) as alone:
        loss = Pipeline(stage, alone, c.pipeline, c.micro_batch).step(tokens)
    ids = tokens[:, :-1]
    reference = torch.nn.functional.cross_entropy(whole.logits(whole.run(None, ids), ids).flatten(0, 1), tokens[:, 1:].flatten())
    reference.backward()
    assert loss == pytest.approx(reference.item(), rel=1e-12)
    for p, q in zip(stage.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-15)  # type: ignore[arg-type]
