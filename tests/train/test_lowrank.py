"""All weights trained with a low-rank optimiser: the optimiser, its run, and what a run leaves."""

import io
import json
import os
import signal

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers import chat_rows, tiny_llama, write_jsonl
from hirank.errors import HirankError
from hirank.optim import presets
from hirank.optim.weights import Int8Weight
from hirank.train import trainer as trainer_module
from hirank.train.aliases import OPTIMIZERS as GALORE_NAMES
from hirank.train.chat import load_chat
from hirank.train.checkpoint import step_dir
from hirank.train.config import build_config, load_config, resolved
from hirank.train.loop import train
from hirank.train.lowrank import CHOICES, build, choices, refuse_processes
from hirank.train.method import METHODS, MethodConfig
from hirank.train.methods import check
from hirank.train.optim import OptimConfig
from hirank.train.runlog import read_log

NAMES = [name for name, method in METHODS.items() if method.optimizer]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(name: str = "galore", **changes) -> MethodConfig:
    return MethodConfig(**({"name": name, "r": 4} | changes))


def meta_llama():
    with torch.device("meta"):
        return tiny_llama()


# The optimiser.


@pytest.mark.parametrize("name", NAMES)
def test_the_presets_own_settings_are_the_defaults(name):
    method = MethodConfig(name=name)
    preset = getattr(presets, METHODS[name].optimizer)
    assert method.r == preset.settings.rank
    assert all(getattr(preset.settings, key) == value for key, value in choices(method).items())
    assert set(CHOICES) - set(choices(method)) <= {"scale_by"}


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_filled_in_and_read_back(name):
    tree = {"model": {"name": "m"}, "data": {"train": "d"}, "method": {"name": name}}
    filled = resolved(build_config(tree))
    assert filled.optim.lr == METHODS[name].learning_rate
    assert filled.method.gap == 200
    assert build_config(filled.model_dump(mode="json")) == filled


@pytest.mark.parametrize("name", NAMES)
def test_all_weights_are_in_it_and_matrices_are_projected(name):
    model = tiny_llama()
    foretold = check(meta_llama(), config(name))
    optimizer = build(model, config(name), OptimConfig(weight_decay=0.1, beta2=0.95))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert type(optimizer).__name__ == METHODS[name].optimizer
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert foretold == sum(p.numel() for p in held)
    assert len(optimizer.projected()) == 14  # seven linears in each of two layers
    assert {tuple(group["betas"]) for group in optimizer.param_groups} == {(0.9, 0.95)}
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [0.1, 0.1, 0.0]  # projected; embeddings and head; norms


def test_options_reach_the_optimiser():
    changes = {"gap": 3, "scale": 2.0, "sides": "two", "state": "bf16", "moments": "project"}
    group = build(tiny_llama(), config(**changes), OptimConfig(seed=7)).param_groups[0]
    assert {key: group[key] for key in changes} == changes
    assert (group["rank"], group["seed"]) == (4, 7)


def test_a_basis_that_looks_at_the_gradient_is_stored():
    group = build(tiny_llama(), config("apollo", basis="svd"), OptimConfig()).param_groups[0]
    assert (group["basis"], group["basis_store"]) == ("svd", "fp32")


@pytest.mark.parametrize(
    ("targets", "count"),
    [("all-linear", 14), (["q_proj", "v_proj"], 4), (["mlp"], 6), (r".*layers\.1\..*", 7)],
)
def test_targets_say_what_is_projected(targets, count):
    method = config(target_modules=targets)
    check(meta_llama(), method)
    assert len(build(tiny_llama(), method, OptimConfig()).projected()) == count


@pytest.mark.parametrize("targets", [["q_proj"], "all-linear"])
def test_only_projected_weights_become_int8(targets):
    model = tiny_llama()
    optimizer = build(model, config("qgalore", target_modules=targets), OptimConfig())
    int8 = [p for p in model.parameters() if isinstance(p, Int8Weight)]
    assert {id(p) for p in int8} == {id(p) for p in optimizer.projected()}


def test_bfloat16_weights_are_rounded_stochastically():
    roundings = [
        build(tiny_llama(dtype=dtype), config(), OptimConfig()).param_groups[0]["weight_rounding"]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert roundings == ["nearest", "stochastic"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_modules": ["q_porj"]}, "'q_porj'.*nearest known one is q_proj"),
        ({"target_modules": ["embed_tokens"]}, "leaves no matrix to project"),
        ({"target_modules": "nothing.*"}, "leaves no matrix to project"),
        ({"limiter": 1.01}, "limiter=1.01 limits a residual"),
        ({"basis": "random", "lazy": 0.4}, "lazy=0.4"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_before_the_weights_load(changes, said):
    with pytest.raises(HirankError, match=said):
        check(meta_llama(), config(**changes))


class Args:
    """What Transformers' arguments say of processes."""

    deepspeed = deepspeed_plugin = None
    world_size = 1


def test_deepspeed_is_refused():
    args = Args()
    args.deepspeed_plugin = object()
    with pytest.raises(HirankError, match="galore cannot run under DeepSpeed ZeRO"):
        refuse_processes(args, config())


def test_several_processes_cannot_step_in_backward():
    args = Args()
    args.world_size = 2
    refuse_processes(args, config())
    with pytest.raises(HirankError, match="before 2 processes have shared"):
        refuse_processes(args, config(step_in_backward=True))


# A run.


@pytest.fixture
def settings(tmp_path, tiny_model_dir):
    rows = write_jsonl(tmp_path / "rows.jsonl", chat_rows(24))

    def make(name: str = "out", **changes):
        tree = {
            "model": {"name": str(tiny_model_dir), "device": "cpu"},
            "data": {"train": str(rows), "eval_fraction": 0.25},
            "method": {"name": "galore", "r": 4, "gap": 2},
            "optim": {"max_steps": 6, "batch_size": 2, "grad_accum": 2, "lr": 1e-2},
            "eval": {"every": 3, "max_new_tokens": 4, "samples": 1},
            "run": {"dir": str(tmp_path / name), "save_every": 3},
        }
        return build_config({part: tree[part] | changes.get(part, {}) for part in tree})

    return make


def run(config, resume=None):
    console = Console(file=io.StringIO(), width=200)
    result = train(config, console=console, resume=resume)
    return result, console.file.getvalue()


@pytest.fixture
def spy(monkeypatch):
    """The trainers that were made, and what is done in a training forward pass of one step."""
    made, at_step = [], {}
    built, forward = trainer_module.Trainer.__init__, trainer_module.Trainer.compute_loss

    def __init__(self, **kwargs):
        built(self, **kwargs)
        made.append(self)

    def compute_loss(self, model, *args, **kwargs):
        if model.training and self.state.global_step + 1 in at_step:
            at_step[self.state.global_step + 1](model)
        return forward(self, model, *args, **kwargs)

    monkeypatch.setattr(trainer_module.Trainer, "__init__", __init__)
    monkeypatch.setattr(trainer_module.Trainer, "compute_loss", compute_loss)
    return made, at_step


def checkpoint_tensors(run_dir, step: int = 6) -> dict[str, torch.Tensor]:
    """Weights, codes and optimiser state of a checkpoint, loaded as data and nothing else."""
    folder = step_dir(run_dir, step)
    found = dict(load_file(folder / "model.safetensors"))
    if (folder / "int8_weights.safetensors").exists():
        found |= load_file(folder / "int8_weights.safetensors")
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    for number, state in saved["state"].items():
        found |= {f"{number}.{key}": torch.as_tensor(value) for key, value in state.items()}
    return found


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype, name
        assert torch.equal(first[name], second[name]), name


@pytest.mark.train
@pytest.mark.parametrize("name", NAMES)
def test_a_run_moves_every_weight_and_leaves_a_plain_model(settings, tiny_model_dir, name):
    method = {"name": name} | ({"r": 1} if name == "apollo-mini" else {})
    result, said = run(settings(method=method, optim={"warmup": 0}))
    before = load_file(tiny_model_dir / "model.safetensors")
    after = load_file(result.weights / "model.safetensors")
    assert before.keys() == after.keys()
    assert [key for key in before if torch.equal(before[key], after[key])] == []
    model = AutoModelForCausalLM.from_pretrained(result.weights)
    assert all(torch.equal(after[key], value) for key, value in model.state_dict().items())
    assert result.after["eval_loss"] < result.before["eval_loss"]
    assert (
        f"{METHODS[name].optimizer}: 14 projected parameters at rank {method.get('r', 4)}" in said
    )
    assert isinstance(load_chat(result.run_dir, max_new_tokens=3).answer("say 3"), str)


@pytest.mark.train
def test_g07_a_switch_of_another_trainer_trains_galore_and_says_so(settings, spy, tmp_path):
    words = {"use_galore": True, "galore_rank": 4, "galore_update_interval": 2}
    tree = settings(optim={"max_steps": 1, "warmup": 0}).model_dump(mode="json", exclude={"method"})
    (tmp_path / "theirs.yaml").write_text(json.dumps(tree | words))
    result, said = run(load_config(tmp_path / "theirs.yaml"))
    assert "GaLoreAdamW: 14 projected parameters at rank 4" in said
    optimizer = spy[0][0].optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    assert isinstance(optimizer, presets.GaLoreAdamW)
    kept = [{"left", "right"} & state.keys() for state in optimizer.state.values()]
    assert sum(map(bool, kept)) == 14 and result.step == 1


@pytest.mark.parametrize("name", GALORE_NAMES)
def test_gb1_every_name_that_is_accepted_trains(name):
    words = [f"optim={name}", "model=some/model", "data=rows.jsonl"]
    settings = load_config(None, words)
    model = tiny_llama().train()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = build(model, settings.method, resolved(settings).optim)
    if settings.method.step_in_backward:
        optimizer.step_in_backward()
    tokens = torch.arange(24).view(2, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["galore_adafactor", "galore_adafactor_layerwise"])
def test_gb1_a_name_that_cannot_be_had_is_refused(name):
    with pytest.raises(HirankError, match=f"optim: {name} names an .* use one of galore_adamw, "):
        load_config(None, [f"optim={name}", "model=some/model", "data=rows.jsonl"])


@pytest.mark.train
def test_the_log_the_report_and_the_card_say_what_was_done(settings):
    result, _ = run(settings())
    start = read_log(result.run_dir / "log.jsonl")[0]
    told = start["optimizer"]
    saved = torch.load(step_dir(result.run_dir, 6) / "optimizer.pt", weights_only=True)
    tensors = [t for s in saved["state"].values() for t in s.values() if torch.is_tensor(t)]
    assert told["class"] == "GaLoreAdamW"
    assert (told["projected"], told["plain"]) == (14, 7)
    assert told["projected_params"] + told["plain_params"] == start["trainable_params"]
    assert told["state_bytes"] == sum(t.numel() * t.element_size() for t in tensors)
    assert told["text"] in result.report.read_text()
    card = (result.run_dir / "README.md").read_text()
    assert "GaLore on all weights, r = 4, scale = 0.25" in card and told["text"] in card
    assert "| gap | 2 |" in card and "dropout" not in card and "library_name: transformers" in card


@pytest.mark.train
@pytest.mark.parametrize("in_backward", [False, True])
def test_g06_the_logged_learning_rate_is_the_applied_one(settings, monkeypatch, in_backward):
    step = presets.GaLoreAdamW.step_parameter
    applied = []

    def remember(self, p, grad, hyper, **kwargs):
        applied.append(hyper.lr)
        return step(self, p, grad, hyper, **kwargs)

    monkeypatch.setattr(presets.GaLoreAdamW, "step_parameter", remember)
    config = settings(
        method={"step_in_backward": in_backward},
        optim={"warmup": 2},
        run={"log_every": 1},
        eval={"samples": 0},
    )
    result, _ = run(config)
    events = [e for e in read_log(result.run_dir / "log.jsonl") if e["event"] == "step"]
    logged = [e["lr"] for e in events]
    assert all(e["grad_norm"] > 0 for e in events)
    alone = 14 + 2  # projected; embeddings and head. Norms go together.
    assert [applied[i] for i in range(0, len(applied), alone)] == logged
    assert len(applied) == 6 * alone and max(logged) == 1e-2


@pytest.mark.train
@pytest.mark.parametrize("name", ["galore", "qgalore", "apollo"])
def test_stepping_in_backward_learns_the_same(settings, spy, name):
    """Bit for bit, without a limit on the norm."""
    ends = []
    for in_backward in (False, True):
        config = settings(
            f"{name}-{in_backward}",
            method={"name": name, "step_in_backward": in_backward},
            optim={"clip": 0, "grad_accum": 1},
        )
        ends.append(checkpoint_tensors(run(config)[0].run_dir))
    assert_same(*ends)
    assert spy[0][1].engine is not None and all(
        p.grad is None for p in spy[0][1].model.parameters()
    )


@pytest.mark.train
def test_accumulating_in_backward_counts_one_step_a_window(settings, spy):
    """18 rows make an epoch of four whole windows and one of a single pass."""
    config = settings(
        method={"step_in_backward": True}, optim={"max_steps": None, "epochs": 2, "clip": 0.5}
    )
    result, _ = run(config)
    assert result.step == 10
    optimizer = spy[0][0].low_rank
    assert {state["step"] for state in optimizer.state.values()} == {10}
    assert spy[0][0].engine.calls == 10 * (14 + 2 + 1) and spy[0][0].engine.waiting_bytes() == 0


@pytest.mark.train
@pytest.mark.parametrize(
    ("name", "in_backward"),
    [*((name, False) for name in NAMES), ("galore", True), ("qgalore", True), ("fira", True)],
)
def test_g10_gb8_a_resumed_run_is_bit_equal(settings, spy, name, in_backward):
    changes = {"method": {"name": name, "step_in_backward": in_backward}}
    whole, _ = run(settings("whole", **changes))
    config = settings("parts", **changes)
    spy[1][3] = lambda model: (spy[1].clear(), os.kill(os.getpid(), signal.SIGINT))
    stopped, _ = run(config)
    assert (stopped.status, stopped.step) == ("interrupted", 3)
    resumed, _ = run(load_config(stopped.run_dir / "config.yaml"), resume=stopped.run_dir)
    assert (resumed.status, resumed.step) == ("finished", 6)
    assert_same(checkpoint_tensors(whole.run_dir), checkpoint_tensors(resumed.run_dir))
    for folder in ("weights", "best"):
        assert_same(
            *(load_file(getattr(r, folder) / "model.safetensors") for r in (whole, resumed))
        )


@pytest.mark.train
def test_a_finished_run_with_int8_weights_is_finished_again(settings):
    result, _ = run(settings(method={"name": "qgalore"}))
    before = load_file(result.weights / "model.safetensors")
    again, _ = run(load_config(result.run_dir / "config.yaml"), resume=result.run_dir)
    assert_same(before, load_file(again.weights / "model.safetensors"))


@pytest.mark.train
@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_that_are_not_finite_are_counted_and_shown(settings, spy, in_backward):
    def spoil(model):
        weight = model.model.layers[0].mlp.up_proj.weight
        handle = weight.register_hook(lambda grad: grad * float("nan"))
        spy[1].clear()
        spy[1][4] = lambda model: handle.remove()

    spy[1][3] = spoil
    config = settings(
        method={"step_in_backward": in_backward},
        optim={"clip": 0, "grad_accum": 1},
        run={"log_every": 1},
    )
    result, said = run(config)
    events = [e for e in read_log(result.run_dir / "log.jsonl") if e["event"] == "step"]
    assert [event["skipped"] for event in events] == [0, 0, 1, 1, 1, 1]
    assert "1 skipped" in said
    assert "1 steps of single parameters were skipped" in result.report.read_text()
    assert "gradient not finite | 1 |" in (result.run_dir / "README.md").read_text()
    assert all(
        torch.isfinite(t).all() for t in load_file(result.weights / "model.safetensors").values()
    )


@pytest.mark.train
def test_large_models_are_saved_in_shards(settings, monkeypatch):
    save = trainer_module.lowrank.plain_weights

    result, _ = run(settings(method={"name": "qgalore"}))
    model = AutoModelForCausalLM.from_pretrained(result.weights)
    build(model, config("qgalore"), OptimConfig())
    folder = result.run_dir / "sharded"
    model.save_pretrained(folder, state_dict=save(model), max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    again = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, value in save(model).items():
        assert torch.equal(again[name], value), name


# On a GPU.


@pytest.mark.gpu
@pytest.mark.train
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_weights_on_a_gpu_learn_and_resume(settings, spy, name, in_backward):
    changes = {
        "model": {"device": "cuda"},
        "method": {"name": name, "step_in_backward": in_backward},
        "optim": {"warmup": 0},
    }
    whole, _ = run(settings("whole", **changes))
    assert {p.dtype for p in spy[0][0].model.parameters()} == {torch.bfloat16}
    assert whole.after["eval_loss"] < whole.before["eval_loss"]
    config = settings("parts", **changes)
    spy[1][3] = lambda model: (spy[1].clear(), os.kill(os.getpid(), signal.SIGINT))
    resumed, _ = run(config, resume=run(config)[0].run_dir)
    first, second = (load_file(r.weights / "model.safetensors") for r in (whole, resumed))
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(first[key], second[key])
    AutoModelForCausalLM.from_pretrained(resumed.weights)
