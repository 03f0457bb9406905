"""A whole run in one process: it learns, repeats itself, goes on where it stopped, and refuses what is poisoned."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from thinpipe import launch
from thinpipe.config import Config, ThinpipeError, from_dict, to_dict
from thinpipe.inference import evaluate, load_run
from thinpipe.method import Subspace
from thinpipe.metrics import read_events
from thinpipe.publish import export_run
from thinpipe.replicas import Alone
from thinpipe.run import Result, finished, open_run, result_of, whats_finished
from thinpipe.tally import Tally
from thinpipe.topology import connect
from thinpipe.trainer import Trainer


def config(folder: Path, corpus: dict[str, Any], **groups: dict[str, Any]) -> Config:
    return from_dict(tiny(**({"data": corpus, "run": {"dir": str(folder)}} | groups)))


def run(config: Config, stop: launch.StopRequest | None = None) -> Result:
    config, folder, _ = open_run(config)
    with connect(30) as alone:
        result = Trainer(config, alone, folder, stop).fit()
    assert result is not None
    return result


def numbers(result: Result) -> dict[str, Any]:
    """Without what depends on the process."""
    return {name: value for name, value in vars(result).items() if name != "peak_rss_mb"}


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in read_events(folder / "metrics.jsonl") if event["event"] == "step"]


@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.slow), "subspace"])
@pytest.mark.parametrize("hidden", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_it_learns(tmp_path: Path, corpus: dict[str, Any], method: str, hidden: str) -> None:
    groups = {"train": {"steps": 60, "eval_every": 0}, "optim": {"hidden": hidden, "lr": 1e-2}, "compression": {"method": method}}
    result = run(config(tmp_path / "run", corpus, **groups))
    assert result.val_loss < 0.6 * math.log(300)
    assert result.steps == 60 and result.tokens == 60 * 16 * 16 and not result.stopped
    assert math.isfinite(result.train_loss) and result.refused_steps == 0


def test_the_same_seed_gives_the_same_losses(tmp_path: Path, corpus: dict[str, Any]) -> None:
    results = [run(config(tmp_path / name, corpus)) for name in "ab"]
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 6
    assert results[0].val_loss == results[1].val_loss
    other = run(config(tmp_path / "c", corpus, run={"dir": str(tmp_path / "c"), "seed": 1}))
    assert other.val_loss != results[0].val_loss


def test_micro_batches_do_not_change_the_gradient(tmp_path: Path, corpus: dict[str, Any]) -> None:
    """FIELD.md kind 3: the same data in one part or in eight."""
    for micro_batches in (1, 8):
        run(config(tmp_path / str(micro_batches), corpus, pipeline={"stages": 1, "micro_batches": micro_batches}))
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "8"), rel=1e-4)


def test_numbers_are_right(tmp_path: Path, corpus: dict[str, Any]) -> None:
    """FIELD.md kind 13: no loss of -1 or 0, tokens counted once; the summary agrees with the metrics and with eval."""
    result = run(config(tmp_path / "run", corpus))
    events = list(read_events(tmp_path / "run" / "metrics.jsonl"))
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5, 6]
    assert [event["tokens"] for event in steps] == [256 * n for n in range(1, 7)]
    assert all(event["loss"] > 1 and event["norm"] > 0 for event in steps)
    assert events[0]["config"]["optim"]["warmup"] == 2
    assert steps[0]["lr"] == pytest.approx(0.002) and steps[1]["lr"] == pytest.approx(0.004)
    assert result.tokens_per_s == pytest.approx(256 / result.seconds_per_step)
    assert not result.wire_measured and result.wire_bytes_per_token == 16 and result.compression == 4
    assert json.loads((tmp_path / "run" / "result.json").read_text())["val_loss"] == result.val_loss
    evaluated = evaluate(tmp_path / "run", batches=2)
    assert evaluated["val_loss"] == pytest.approx(result.val_loss, rel=1e-6)
    assert evaluated["perplexity"] == pytest.approx(math.exp(result.val_loss))
    assert 0 < evaluated["bits_per_byte"] < 8


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path, corpus: dict[str, Any]) -> None:
    groups: dict[str, Any] = {"train": {"steps": 20, "checkpoint_every": 4}, "compression": {"move_every": 3}}
    whole = run(config(tmp_path / "whole", corpus, **groups))
    stopped = run(config(tmp_path / "parts", corpus, **groups | {"train": groups["train"] | {"stop_at": 13}}))
    assert stopped.stopped and stopped.steps == 13
    rest = run(config(tmp_path / "parts", corpus, **groups))
    assert not rest.stopped and rest.val_loss == whole.val_loss and rest.train_loss == whole.train_loss
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_life_that_has_nothing_left_to_train_tells_what_the_one_before_did(tmp_path: Path, corpus: dict[str, Any]) -> None:
    """Killed after the last checkpoint: all is saved but the summary."""
    first = run(config(tmp_path / "run", corpus))
    (tmp_path / "run/result.json").unlink()
    again = run(config(tmp_path / "run", corpus))
    assert numbers(again) == numbers(first) | {"seconds_per_step": again.seconds_per_step, "tokens_per_s": again.tokens_per_s}
    assert again.seconds_per_step > 0 and again.tokens_per_s > 0


def test_what_is_finished_is_asked_with_the_step_that_ends_it(tmp_path: Path, corpus: dict[str, Any]) -> None:
    asked = config(tmp_path / "run", corpus, train={"steps": 6, "stop_at": 3})
    assert finished(tmp_path / "run", asked) is None
    run(asked)
    assert finished(tmp_path / "run", asked) is not None
    assert whats_finished(tmp_path, asked).endswith("raise train.stop_at to train on")
    on = replace(asked, train=replace(asked.train, stop_at=None))
    assert finished(tmp_path / "run", on) is None
    other = replace(on, pipeline=replace(on.pipeline, replicas=2))
    (tmp_path / "run/replicas").mkdir()
    run(config(tmp_path / "run/replicas/1", corpus, train={"steps": 6}))
    by_other = finished(tmp_path / "run", other)
    assert by_other is not None and by_other.run == str(tmp_path / "run/replicas/1")


def test_nobody_is_told_that_a_run_is_finished_before_its_result_stands(tmp_path: Path, corpus: dict[str, Any]) -> None:
    """A replica that dies in its last validation would leave a run that nobody finishes."""
    told = []

    class Recorder(Alone):
        def leave(self, finished: bool) -> None:
            told.append((finished, (tmp_path / "run/result.json").exists()))

    opened, folder, _ = open_run(config(tmp_path / "run", corpus))
    with connect(20) as alone:
        training = Trainer(opened, alone, folder)
        training.replicas = Recorder()
        assert training.fit() is not None
    assert told == [(False, False), (True, True)]


def test_replicas_do_not_take_stop_at_for_the_end(tmp_path: Path, corpus: dict[str, Any]) -> None:
    """Ways averaged there as at the end would make the rest another run than one without a stop."""
    told = []

    class Recorder(Alone):
        def stepped(self, step: int, last: bool, settle: bool) -> None:
            told.append((step, last))

    for steps in ({"steps": 4, "stop_at": 2}, {"steps": 4}):
        opened, folder, _ = open_run(config(tmp_path / "run", corpus, train=steps))
        with connect(20) as alone:
            training = Trainer(opened, alone, folder)
            training.replicas = Recorder()
            training.fit()
    assert told == [(1, False), (2, False), (3, False), (4, True)]


def test_a_stop_request_saves_and_says_so(tmp_path: Path, corpus: dict[str, Any]) -> None:
    class AskedAtOnce:
        asked = True

    with pytest.raises(launch.Stopped):
        run(config(tmp_path / "run", corpus), AskedAtOnce())  # type: ignore[arg-type]
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").is_dir()
    assert result_of(tmp_path / "run") is None
    assert run(config(tmp_path / "run", corpus)).steps == 6


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ({"optim": {"lr": 1e-5}}, "optim.lr"),
        ({"compression": {"rank": 4, "segments": 8}}, "compression.rank"),
        ({"run": {"seed": 3}}, "run.seed"),
        ({"train": {"batch": 8}}, "train.batch"),
        ({"train": {"steps": 5}}, "train.steps"),
        ({"model": {"hidden": 96}}, "model.hidden"),
    ],
)
def test_what_may_not_change_on_resume_is_named(tmp_path: Path, corpus: dict[str, Any], groups: dict[str, Any], named: str) -> None:
    first = config(tmp_path / "run", corpus)
    open_run(first)
    (tmp_path / "run/checkpoints").mkdir()
    changed = {group: vars(getattr(first, group)) | groups.get(group, {}) for group in ("run", "optim", "train", "model", "compression")}
    changed = {group: {k: list(v) if isinstance(v, tuple) else v for k, v in f.items() if v is not None} for group, f in changed.items()}
    again = replace(from_dict(changed), data=first.data, pipeline=first.pipeline)
    with pytest.raises(ThinpipeError, match=named.replace(".", r"\.")):
        open_run(again)


def test_what_may_change_on_resume(tmp_path: Path, corpus: dict[str, Any]) -> None:
    first = config(tmp_path / "run", corpus, compression={"rank": 8, "segments": 4})
    open_run(first)
    (tmp_path / "run/checkpoints").mkdir()
    later = replace(first, train=replace(first.train, steps=9, eval_every=1), pipeline=replace(first.pipeline, stages=2, schedule="gpipe"))
    later = replace(later, compression=replace(later.compression, segments=None))
    opened, _, remarks = open_run(later)
    assert opened.segments == 4 and opened.pipeline.stages == 2
    assert len(remarks) == 1 and "train.steps" in remarks[0]


def test_a_run_that_has_not_begun_takes_another_config(tmp_path: Path, corpus: dict[str, Any]) -> None:
    """A mistake that was told before the first step, once mended, needs no new folder."""
    wrong = config(tmp_path / "run", corpus | {"files": ["nowhere/*.txt"]})
    with pytest.raises(ThinpipeError, match="nowhere"):
        run(wrong)
    assert run(config(tmp_path / "run", corpus, optim={"lr": 1e-3})).steps == 6


def test_foreign_folders_are_not_touched(tmp_path: Path, corpus: dict[str, Any]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ThinpipeError, match=r"run\.dir"):
        open_run(config(tmp_path, corpus))


def test_a_poisoned_step_is_refused(tmp_path: Path, corpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.batch
    poisoned: list[Trainer] = []

    def batch(self: Trainer, step: int) -> torch.Tensor | None:
        weight = self.stage.layers["0"].attn.q.weight
        if step == 2:
            poisoned.append(self)
            self.before = weight[0, 0].item()  # type: ignore[attr-defined]
            weight.data[0, 0] = math.nan
        elif step == 3:
            weight.data[0, 0] = self.before  # type: ignore[attr-defined]
        return original(self, step)

    monkeypatch.setattr(Trainer, "batch", batch)
    result = run(config(tmp_path / "run", corpus))
    assert result.refused_steps == 1 and math.isfinite(result.val_loss) and math.isfinite(result.train_loss)
    told = [event["loss"] for event in read_events(tmp_path / "run" / "metrics.jsonl") if event["event"] == "step"]
    assert told[2] is None and all(math.isfinite(loss) for loss in told[:2] + told[3:])


def test_a_dense_run_starts_from_a_hugging_face_folder(tmp_path: Path, corpus: dict[str, Any]) -> None:
    dense = {"method": "none", "rank": 8, "segments": 8, "wire": "float32"}
    source = config(tmp_path / "source", corpus, compression=dense)
    before = run(source)
    export_run(tmp_path / "source", tmp_path / "hf")
    initial = {"init_from": str(tmp_path / "hf"), "context": 16}
    values = {group: vars(getattr(source, group)) for group in ("run", "data", "pipeline", "optim")}
    values = {group: {k: list(v) if isinstance(v, tuple) else v for k, v in f.items() if v is not None} for group, f in values.items()}
    again = from_dict(values | {"model": initial, "compression": dense, "train": vars(source.train) | {"stop_at": None, "steps": 1}})
    values = to_dict(again)
    values["run"]["dir"] = str(tmp_path / "again")
    opened, folder, _ = open_run(from_dict(values))
    assert opened.data.tokenizer == str(tmp_path / "hf" / "tokenizer.json")
    with connect(30) as alone:
        trainer = Trainer(opened, alone, folder)
        trained = load_run(tmp_path / "source").stage.weights()
        assert all(torch.equal(tensor, trained[name]) for name, tensor in trainer.stage.weights().items())
        assert trainer.evaluate() == pytest.approx(before.val_loss, rel=1e-5)
        trainer.metrics.close()
        tables = replace(opened, compression=replace(opened.compression, stage_table="full", local_loss=0.3))  # at first of zeros
        trainer = Trainer(tables, alone, folder)
        assert trainer.evaluate() == pytest.approx(before.val_loss, rel=1e-5)
        trainer.metrics.close()
    with pytest.raises(ThinpipeError, match=r"model\.init_from starts a dense model"):
        from_dict(tiny(model=initial)).check()


def test_a_run_starts_from_another_ones_basis(tmp_path: Path, corpus: dict[str, Any]) -> None:
    groups: dict[str, Any] = {"compression": {"move_every": 2, "segments": 8, "rank": 8}}
    run(config(tmp_path / "source", corpus, **groups))
    warm = {"compression": groups["compression"] | {"init_from": str(tmp_path / "source")}}
    open_run(config(tmp_path / "warm", corpus, **groups, run={"dir": str(tmp_path / "warm"), "seed": 5}))  # never began: binds nothing
    opened, folder, _ = open_run(config(tmp_path / "warm", corpus, **warm, run={"dir": str(tmp_path / "warm"), "seed": 5}))
    assert opened.static_seed == 0 and opened.run.seed == 5
    with connect(30) as alone:
        trainer = Trainer(opened, alone, folder)
        trainer.metrics.close()
    theirs = load_run(tmp_path / "source").stage.method
    method = trainer.stage.method
    assert isinstance(method, Subspace) and isinstance(theirs, Subspace)
    assert torch.equal(method.U_DK, theirs.U_DK) and method.digest() == theirs.digest()
    start = method.table(torch.arange(method.table.vocab), torch.float32) @ method.U_DK * method.embedding_start
    assert torch.allclose(trainer.stage.embed.weight, start, atol=1e-5)
    begun = run(opened)
    (tmp_path / "source").rename(tmp_path / "gone")  # the run has all of its own by now
    for again in (warm, groups):
        (tmp_path / "warm/result.json").unlink()
        assert run(config(tmp_path / "warm", corpus, **again, run={"dir": str(tmp_path / "warm"), "seed": 5})).val_loss == begun.val_loss
    (tmp_path / "gone").rename(tmp_path / "source")
    for field, value in (("rank", 4), ("method", "none"), ("static", "gaussian"), ("static_scale", 0.5)):
        with pytest.raises(ThinpipeError, match=rf"source' has compression\.{field} = "):
            open_run(config(tmp_path / field, corpus, compression=warm["compression"] | {field: value}))
    with pytest.raises(ThinpipeError, match=r"has a vocabulary of 300 and this run one of 310: another static"):
        run(config(tmp_path / "other", corpus | {"vocab": 310}, **warm))


def test_a_sample_that_can_not_be_encoded_costs_only_the_sample(tmp_path: Path, corpus: dict[str, Any]) -> None:
    words = {word for file in (tmp_path / "corpus").iterdir() for word in file.read_text().split()}
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(sorted(words))}))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "words.json"))
    data = corpus | {"tokenizer": str(tmp_path / "words.json")}
    result = run(config(tmp_path / "run", data, train={"steps": 2, "sample": "no-such-word"}))
    told = [event["text"] for event in read_events(tmp_path / "run/metrics.jsonl") if event["event"] == "complaint"]
    assert result.sample == "" and result.steps == 2
    assert len(told) == 1 and told[0].startswith("no sample: the text 'no-such-word' can't be encoded"), told


def test_a_spike_behind_a_resume_is_one_of_the_steps_before_it(
    tmp_path: Path, corpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer.train_step

    def train_step(self: Trainer, step: int) -> Tally:
        total = original(self, step)
        return replace(total, loss=50.0) if step + self.skipped == 14 else total

    monkeypatch.setattr(Trainer, "train_step", train_step)
    steps = {"steps": 16, "checkpoint_every": 6, "roll_back_above": 1.5, "eval_every": 0}
    run(config(tmp_path / "run", corpus, train=steps | {"stop_at": 13}))
    run(config(tmp_path / "run", corpus, train=steps))
    (told,) = [event["text"] for event in read_events(tmp_path / "run/metrics.jsonl") if event["event"] == "complaint"]
    assert told == "step 15 was a spike of the loss: back to step 13, 2 batches are left out"


def test_a_spike_rolls_back_and_skips_its_batches(tmp_path: Path, corpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"steps": 24, "checkpoint_every": 6, "roll_back_above": 1.5, "eval_every": 0}
    original, asked = Trainer.train_step, []

    def train_step(self: Trainer, step: int) -> Tally:
        total = original(self, step)
        asked.append(step + self.skipped)
        return replace(total, loss=50.0) if asked[-1] == 14 else total

    monkeypatch.setattr(Trainer, "train_step", train_step)
    result = run(config(tmp_path / "run", corpus, train=steps))
    # Step 15 has the spike; the checkpoint is that of step 12, and batches 12 to 14 are left out.
    assert asked == [*range(15), *range(15, 27)] and result.steps == 24
    events = list(read_events(tmp_path / "run" / "metrics.jsonl"))
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 25))
    tokens = {event["step"]: event["tokens"] for event in events if event["event"] == "step"}
    assert all(count == step * tokens[1] for step, count in tokens.items()) and result.tokens == 24 * tokens[1]
    (told,) = [event["text"] for event in events if event["event"] == "complaint"]
    assert told == "step 15 was a spike of the loss: back to step 12, 3 batches are left out"
    # What the rest computes is what a run from that checkpoint with the later batches computes.
    assert all(event["loss"] < 50 for event in events if event["event"] == "step")
