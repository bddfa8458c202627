"""A run as a whole: what it writes, and that stopping and going on changes nothing."""

import io
import json
import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from helpers import chat_rows, write_jsonl
from hirank.errors import HirankError
from hirank.train import trainer as trainer_module
from hirank.train.checkpoint import step_dir, steps
from hirank.train.config import TrainConfig, build_config, load_config
from hirank.train.loop import RunResult, train
from hirank.train.run import RunConfig, claim_run_dir
from hirank.train.runlog import read_events, read_log

pytestmark = pytest.mark.train


@pytest.fixture(autouse=True)
def one_thread():
    """These models are so small that a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings_in(folder: Path, model: Path, name: str, **changes) -> TrainConfig:
    """A small run in which everything is random that can be: dropout and data order."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        write_jsonl(rows, chat_rows(24))
    tree = {
        "model": {"name": str(model), "device": "cpu"},
        "data": {"train": str(rows), "eval_fraction": 0.25},
        "method": {"name": "dora", "r": 4, "dropout": 0.2},
        "optim": {"max_steps": 6, "batch_size": 2, "grad_accum": 2, "lr": 1e-2},
        "eval": {"every": 2, "max_new_tokens": 4, "samples": 3},
        "run": {"dir": str(folder / name), "save_every": 3},
    }
    for part, values in changes.items():
        tree[part] = tree[part] | values
    return build_config(tree)


@pytest.fixture
def settings(tmp_path, tiny_model_dir):
    def make(name: str = "out", **changes) -> TrainConfig:
        return settings_in(tmp_path, tiny_model_dir, name, **changes)

    return make


def run(config: TrainConfig, resume: Path | None = None) -> RunResult:
    return train(config, console=Console(file=io.StringIO()), resume=resume)


@pytest.fixture(scope="module")
def original(tmp_path_factory, tiny_model_dir) -> RunResult:
    """A finished run with plain settings: read it, do not write to it."""
    folder = tmp_path_factory.mktemp("original")
    return run(settings_in(folder, tiny_model_dir, "out", eval={"exact_match": True}))


@pytest.fixture
def finished(original, tmp_path) -> Path:
    """A copy of that run and of its data, to go on with."""
    shutil.copytree(original.run_dir.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out"


@pytest.fixture
def stop_at(monkeypatch):
    """Send a signal to this process in the middle of a step's forward pass."""
    assert threading.current_thread() is threading.main_thread()

    def arrange(step: int, *signals: int) -> None:
        forward = trainer_module.Trainer.compute_loss
        left = list(signals)

        def compute_loss(self, *args, **kwargs):
            if self.state.global_step == step - 1 and self.model.training:
                while left:
                    os.kill(os.getpid(), left.pop(0))
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(trainer_module.Trainer, "compute_loss", compute_loss)

    return arrange


def same_tensors(first, second) -> bool:
    """Equal keys, types and bits, at any depth."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        keys = first.keys() == second.keys()
        return keys and all(same_tensors(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        pairs = zip(first, second, strict=True)
        return len(first) == len(second) and all(same_tensors(a, b) for a, b in pairs)
    return bool(first == second)


def state_of(checkpoint: Path) -> dict:
    """Weights, optimizer, scheduler and random states of a checkpoint."""
    weights = "adapter_model" if (checkpoint / "adapter_config.json").exists() else "model"
    parts = {name: torch.load(checkpoint / name) for name in ("optimizer.pt", "scheduler.pt")}
    rng = torch.load(checkpoint / "rng_state.pth", weights_only=False)
    return parts | {
        "weights": load_file(checkpoint / f"{weights}.safetensors"),
        "torch": rng["cpu"],
        "python": rng["python"],
        "numpy": [
            part if isinstance(part, str | int | float) else part.tolist() for part in rng["numpy"]
        ],
    }


def trace(run_dir: Path) -> list[tuple]:
    """What was measured at each step, without times."""
    keys = ("event", "step", "loss", "lr", "grad_norm", "tokens", "eval_loss", "exact_match")
    events = [e for e in read_log(run_dir / "log.jsonl") if e["event"] in ("step", "eval")]
    return sorted(tuple(event.get(key) for key in keys) for event in events)


# What a run writes.


def test_a_run_writes_its_folder(original):
    assert (original.status, original.step) == ("finished", 6)
    names = {path.name for path in original.run_dir.iterdir()}
    assert names == {
        "adapter", "adapter-best", "checkpoints", "config.yaml", "log.jsonl", "report.html",
        "README.md", "samples.jsonl", "versions.json",
    }  # fmt: skip
    assert [path.name for path in steps(original.run_dir)] == ["step-6", "step-3"]
    assert original.after["eval_loss"] < original.before["eval_loss"]
    assert {"exact_match", "n"} <= original.before.keys() & original.after.keys()
    assert json.loads((original.run_dir / "versions.json").read_text())["device"] == "cpu"


def test_the_log_tells_the_run(original):
    events = read_log(original.run_dir / "log.jsonl")
    told = {name: [e for e in events if e["event"] == name] for name in ("start", "sample", "end")}
    start = told["start"][0]
    assert (start["n_train"], start["n_eval"]) == (18, 6)
    assert start["trainable_params"] == 4608 and len(start["layers"]) == 14
    assert [e["phase"] for e in told["sample"]] == ["before"] * 3 + ["after"] * 3
    assert told["end"][0]["status"] == "finished"
    assert [e["step"] for e in events if e["event"] == "eval"] == [0, 2, 4, 6]
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == [3, 6]


def test_the_best_weights_are_those_of_the_lowest_held_out_loss(settings):
    config = settings(
        optim={"lr": 0.3, "scheduler": "constant", "warmup": 0}, run={"save_every": 2, "keep": 9}
    )
    result = run(config)
    evals = [
        e for e in read_log(result.run_dir / "log.jsonl") if e["event"] == "eval" and e["step"]
    ]
    best = min(evals, key=lambda event: event["eval_loss"])["step"]
    checkpoint = step_dir(result.run_dir, best)
    weights = "adapter_model.safetensors"
    assert same_tensors(load_file(result.best / weights), load_file(checkpoint / weights))


def test_held_out_loss_weighs_every_token_alike(settings, tmp_path):
    uneven = [{"prompt": "say", "completion": text} for text in ("a", "b c d e f g h i j k l m")]
    held = write_jsonl(tmp_path / "held.jsonl", uneven)
    losses = [
        run(
            settings(
                f"by-{size}",
                data={"eval": str(held)},
                eval={"batch_size": size, "samples": 0},
                optim={"max_steps": 1},
            )
        ).before["eval_loss"]
        for size in (1, 2)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_measuring_more_changes_nothing(settings, original):
    often = run(settings("often", eval={"every": 1, "exact_match_every_eval": True, "samples": 0}))
    first, second = (state_of(step_dir(r.run_dir, 6)) for r in (often, original))
    assert same_tensors(first, second)


def test_stock_layers_learn_the_same(settings, original):
    stock = run(settings("stock", method={"accelerate": False}))
    first, second = (state_of(step_dir(r.run_dir, 6))["weights"] for r in (original, stock))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("data", [{"packing": True, "max_length": 64}, {"eval_fraction": 0}])
def test_packing_and_no_held_out_rows(settings, data):
    result = run(settings(data=data, optim={"max_steps": 2}))
    assert result.status == "finished"
    assert (result.best is None) == ("eval_fraction" in data)


def test_recomputing_activations_learns_the_same(settings, original):
    saved = run(settings("saved", optim={"checkpointing": True}))
    first, second = (state_of(step_dir(r.run_dir, 6))["weights"] for r in (original, saved))
    assert same_tensors(first, second)


# Going on.


@pytest.mark.parametrize("method", ["dora", "rslora", "full"])
def test_d57_three_and_three_steps_are_six_bit_for_bit(settings, stop_at, method):
    changes = {"method": {"name": method}, "eval": {"exact_match_every_eval": True}}
    whole = run(settings("whole", **changes))
    stop_at(3, signal.SIGINT)
    config = settings("parts", **changes)
    stopped = run(config)
    assert (stopped.status, stopped.step) == ("interrupted", 3)
    resumed = run(config, resume=stopped.run_dir)
    assert (resumed.status, resumed.step) == ("finished", 6)
    first, second = (state_of(step_dir(r.run_dir, 6)) for r in (whole, resumed))
    assert same_tensors(first, second)
    assert trace(whole.run_dir) == trace(resumed.run_dir)
    for name in ("weights", "best"):
        files = [next(getattr(r, name).glob("*.safetensors")) for r in (whole, resumed)]
        assert same_tensors(*map(load_file, files))


def test_going_on_from_an_older_checkpoint_and_across_epochs(settings):
    changes = {"optim": {"max_steps": None, "epochs": 2}, "run": {"save_every": 5, "keep": 9}}
    config = settings(**changes)
    whole = run(config)  # 18 rows, 4 a step: 5 steps an epoch
    assert whole.step == 10
    before = state_of(step_dir(whole.run_dir, 10))
    run(config, resume=step_dir(whole.run_dir, 5))
    assert same_tensors(before, state_of(step_dir(whole.run_dir, 10)))


def test_a_finished_run_is_finished_again_without_another_step(finished):
    before = load_file(finished / "adapter" / "adapter_model.safetensors")
    again = run(load_config(finished / "config.yaml"), resume=finished)
    assert (again.status, again.step) == ("finished", 6)
    assert same_tensors(before, load_file(again.weights / "adapter_model.safetensors"))


def test_more_steps_and_other_measuring_are_allowed_at_resume(settings, finished):
    longer = settings(optim={"max_steps": 7}, eval={"every": 1, "samples": 1}, run={"keep": 1})
    assert run(longer, resume=finished).step == 7
    assert [path.name for path in steps(finished)] == ["step-7"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": {"r": 2}}, "method.r was 4 and is now 2"),
        ({"optim": {"lr": 1.0}}, "optim.lr was 0.01 and is now 1.0"),
        ({"data": {"max_length": 99}}, "data.max_length"),
    ],
)
def test_other_settings_are_refused_at_resume(settings, finished, change, named):
    with pytest.raises(HirankError, match=named):
        run(settings(**change), resume=finished)


def test_other_data_is_refused_at_resume(settings, finished, tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", chat_rows(25)[1:])
    with pytest.raises(HirankError, match="training data is not what"):
        run(settings(), resume=finished)


# Stopping.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_saves(settings, stop_at, number):
    stop_at(2, number)
    result = run(settings())
    assert (result.status, result.step) == ("interrupted", 2)
    assert [path.name for path in steps(result.run_dir)] == ["step-2"]
    assert read_events(result.run_dir / "log.jsonl")[-1]["status"] == "interrupted"
    assert not result.weights.exists()
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)


def test_a_second_signal_stops_at_once(settings, stop_at, tmp_path):
    stop_at(5, signal.SIGINT, signal.SIGINT)
    console = Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        train(settings(), console=console)
    assert [path.name for path in steps(tmp_path / "out")] == ["step-3"]
    assert "Resume from step-3: hirank train --resume" in console.file.getvalue()


def test_before_the_first_step_nothing_is_left_behind(settings, monkeypatch, tmp_path):
    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("hirank.train.model.load_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(settings())
    assert not (tmp_path / "out").exists()


def test_a_full_disk_while_saving_leaves_the_old_checkpoint_whole(settings, monkeypatch, tmp_path):
    """From step 6 on no file may grow beyond 8 KB, which fails writes as a full disk does."""
    save = trainer_module.Trainer._save_checkpoint
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_on_small_disk(self, *args):
        small = 1 << 13 if self.state.global_step == 6 else limit[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, limit[1]))
        try:
            save(self, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    monkeypatch.setattr(trainer_module.Trainer, "_save_checkpoint", save_on_small_disk)
    config = settings()
    with pytest.raises(HirankError, match="step-6: the disk is full") as caught:
        run(config)
    assert "\n" not in str(caught.value)
    checkpoints = tmp_path / "out" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-3"]
    monkeypatch.undo()
    assert run(config, resume=tmp_path / "out").step == 6


def test_modules_trained_whole_are_saved_and_resumed(settings, stop_at):
    config = settings(method={"modules_to_save": ["embed_tokens"]}, optim={"max_steps": 2})
    stop_at(1, signal.SIGINT)
    resumed = run(config, resume=run(config).run_dir)
    names = load_file(resumed.weights / "adapter_model.safetensors").keys()
    assert "base_model.model.model.embed_tokens.weight" in names


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["dora", "full"])
def test_mixed_precision_on_a_gpu_and_resume(settings, stop_at, method):
    changes = {"model": {"device": "cuda"}, "method": {"name": method}}
    built, seen = trainer_module.Trainer.__init__, []

    def remember(self, **kwargs):
        built(self, **kwargs)
        seen.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "__init__", remember)
        whole = run(settings("whole", **changes))
    parameters = list(seen[0].model.parameters())
    base = torch.bfloat16 if method == "dora" else torch.float32
    assert {p.dtype for p in parameters if not p.requires_grad} <= {base}
    assert {p.dtype for p in parameters if p.requires_grad} == {torch.float32}
    states = [t for state in seen[0].optimizer.state.values() for t in state.values()]
    assert {t.dtype for t in states} == {torch.float32}
    assert seen[0].args.bf16
    stop_at(3, signal.SIGINT)
    config = settings("parts", **changes)
    resumed = run(config, resume=run(config).run_dir)
    first, second = (state_of(step_dir(r.run_dir, 6))["weights"] for r in (whole, resumed))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name])


# Folders.


def test_a_folder_that_exists_is_never_written_to(settings, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(HirankError, match="exists already.*--resume"):
        run(settings())
    assert list((tmp_path / "out").iterdir()) == []


def test_runs_without_a_folder_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(name="mine")
    assert [claim_run_dir(config) for _ in range(2)] == [Path("runs/mine-1"), Path("runs/mine-2")]
