"""The command line: exit codes, one sentence for bad input, and nothing half-written."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import hirank
from helpers import chat_rows, save_tiny_model, tiny_llama, tiny_tokenizer, write_jsonl
from hirank.cli import app
from hirank.train import chat, trainer
from hirank.train.checkpoint import step_dir


@pytest.fixture(autouse=True)
def one_thread():
    """These models are so small that a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def call(*words: object, **options):
    return CliRunner().invoke(app, [str(word) for word in words], **options)


def write_config(folder: Path, model_dir: Path, **changes) -> Path:
    tree = {
        "model": {"name": str(model_dir), "device": "cpu"},
        "data": {"train": str(folder / "rows.jsonl"), "eval_fraction": 0.25},
        "method": {"name": "dora", "r": 4},
        "optim": {"max_steps": 2, "batch_size": 4},
        "eval": {"every": 0, "max_new_tokens": 4, "samples": 1, "exact_match": True},
        "run": {"dir": str(folder / "out"), "save_every": 1},
    }
    for part, values in changes.items():
        tree[part] = tree[part] | values
    if not (folder / "rows.jsonl").exists():
        write_jsonl(folder / "rows.jsonl", chat_rows(12))
    (folder / "train.yaml").write_text(yaml.safe_dump(tree))
    return folder / "train.yaml"


@pytest.fixture
def config(tmp_path, tiny_model_dir):
    def make(**changes) -> Path:
        return write_config(tmp_path, tiny_model_dir, **changes)

    return make


@pytest.fixture(scope="module")
def done(tmp_path_factory, tiny_model_dir):
    """(result of the command, run folder) of a finished run: read it, do not write to it."""
    folder = tmp_path_factory.mktemp("done")
    result = call("train", write_config(folder, tiny_model_dir, data={"system": "be brief"}))
    return result, folder / "out"


def python(*words: str) -> str:
    """What a Python of its own, which finds hirank where this one does, prints."""
    env = os.environ | {"PYTHONPATH": str(Path(hirank.__file__).parents[1])}
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


# Good input.


def test_help_is_quick_and_names_the_commands():
    code = (
        "import sys; from hirank.cli import app; app(['--help'], standalone_mode=False);"
        "heavy = {'torch', 'transformers', 'peft', 'trl', 'pydantic'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    shown = python("-c", code)
    assert all(name in shown for name in ("train", "chat", "version"))


def test_python_m_hirank_version():
    assert python("-m", "hirank", "version").strip() == hirank.__version__


def test_train_says_what_came_of_it(done):
    result, run_dir = done
    assert result.exit_code == 0, result.output
    for text in (
        "Finished at step 2",
        "Held-out loss",
        "Exact match",
        "Sample: say ",
        "  expected  ",
        "  before    ",
        "  after     ",
        "hirank chat",
        "report.html",
    ):
        assert text in result.stdout
    assert result.stderr == ""
    assert (run_dir / "report.html").is_file()


def test_a_loss_that_is_no_number_is_told(config):
    ruin = {"optim": {"max_steps": 4, "lr": 1e30}, "method": {"name": "full"}}
    result = call("train", config(**ruin))
    assert result.exit_code == 0, result.output
    assert "The loss was no finite number at step" in result.stdout


def test_a_terminal_sees_only_our_words(config):
    words = [sys.executable, "-m", "hirank", "train", str(config(optim={"max_steps": 1}))]
    paths = [str(Path(hirank.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    shown = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
    assert shown.stderr == ""
    starts = ("12 rows", "loading", "4,608", "step", "Finished", "Held-out", "Exact", "Weights")
    starts += (
        "answering ",
        "plan: ",
        "Try it",
        "Report",
        "Sample: ",
        "  expected",
        "  before",
        "  after",
    )
    assert [line for line in shown.stdout.splitlines() if not line.startswith(starts)] == []


def test_dry_run_writes_nothing(config, tmp_path):
    result = call("train", config(), "--dry-run", "--set", "optim.batch_size=2")
    assert result.exit_code == 0, result.output
    assert "batch_size: 2" in result.stdout and "9 rows to train on, 3 held out" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "train.yaml"]


def test_resume_needs_no_configuration(done, tmp_path):
    result = call("train", "--resume", done[1], "--dry-run")
    assert result.exit_code == 0, result.output


def test_skip_bad_rows_is_explicit_and_counts(config, tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [*chat_rows(8), {"nothing": 1}])
    assert call("train", config(), "--dry-run").exit_code == 2
    result = call("train", config(), "--dry-run", "--skip-bad-rows")
    assert result.exit_code == 0 and "1 bad rows left out" in result.stdout


def test_ctrl_c_ends_with_130_and_says_how_to_resume(config, tmp_path, monkeypatch):
    step = trainer.Trainer.training_step

    def interrupted(self, *args, **kwargs):
        os.kill(os.getpid(), 2)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(trainer.Trainer, "training_step", interrupted)
    result = call("train", config())
    assert result.exit_code == 130, result.output
    assert f"hirank train --resume {tmp_path / 'out'}" in result.stdout.replace("\n", "")
    monkeypatch.undo()
    assert call("train", "--resume", tmp_path / "out").exit_code == 0


# Bad input: the sentence, the code, nothing left behind.


def refused(config: Path, *said: str, overrides: tuple[str, ...] = ()) -> str:
    """Check that training is refused with exit code 2 and leaves no run folder; the sentence."""
    words = [word for override in overrides for word in ("--set", override)]
    result = call("train", config, *words)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    for text in said:
        assert text in result.stderr
    assert sorted(p.name for p in config.parent.iterdir() if p.name.startswith(("out", "."))) == []
    return result.stderr.strip()


def is_one_sentence(text: str) -> bool:
    return "\n" not in text and text.endswith(".")


def test_no_such_model_folder(config, tmp_path):
    save_tiny_model(tmp_path / "models" / "smol-135")
    sentence = refused(
        config(model={"name": str(tmp_path / "models" / "smol-153")}),
        "no model folder",
        str(tmp_path / "models" / "smol-135"),
    )
    assert is_one_sentence(sentence)


def test_no_such_model_on_the_hub(config):
    sentence = refused(config(model={"name": "nobody/nothing"}), "nobody/nothing")
    assert is_one_sentence(sentence)


def test_a_folder_without_a_model(config, tmp_path):
    (tmp_path / "empty").mkdir()
    sentence = refused(config(model={"name": str(tmp_path / "empty")}), "holds no model")
    assert is_one_sentence(sentence)


def test_broken_weights(config, tmp_path):
    model = save_tiny_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"not weights")
    sentence = refused(config(model={"name": str(model)}), "Cannot read the weights")
    assert is_one_sentence(sentence)


def test_no_matching_target_modules(config):
    changed = config(method={"target_modules": ["c_attn"]})
    sentence = refused(changed, "matches no layer", "q_proj")
    assert is_one_sentence(sentence)


def test_rank_larger_than_the_layer(config):
    sentence = refused(config(method={"r": 17}), "rank 17 is larger", "k_proj", "32 to 16")
    assert is_one_sentence(sentence)


def test_empty_dataset(config, tmp_path):
    (tmp_path / "rows.jsonl").touch()
    sentence = refused(config(), "is empty")
    assert is_one_sentence(sentence)


def test_all_rows_longer_than_max_length(config):
    sentence = refused(config(data={"max_length": 4}), "max_length")
    assert is_one_sentence(sentence)


def test_mixed_formats_in_one_file(config, tmp_path):
    rows = [*chat_rows(3), {"instruction": "a", "output": "b"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    refused(config(), "rows.jsonl:4", "one format")


def test_tokenizer_without_chat_template_for_chat_data(config, tmp_path):
    model = save_tiny_model(tmp_path / "base", chat_template=None)
    sentence = refused(config(model={"name": str(model)}), "chat template")
    assert is_one_sentence(sentence)


def test_read_only_output_folder(config, tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir(mode=0o500)
    if os.geteuid() == 0:  # root may write anywhere: let the system call fail instead
        make = Path.mkdir

        def read_only(self, *args, **kwargs):
            if place in self.parents:
                raise OSError(errno.EROFS, "Read-only file system")
            return make(self, *args, **kwargs)

        monkeypatch.setattr(Path, "mkdir", read_only)
    sentence = refused(
        config(run={"dir": str(place / "run")}), "Cannot make the run folder", "read-only"
    )
    assert is_one_sentence(sentence)
    assert list(place.iterdir()) == []


def test_an_output_folder_inside_a_file(config, tmp_path):
    sentence = refused(config(run={"dir": str(tmp_path / "rows.jsonl" / "run")}), "not a folder")
    assert is_one_sentence(sentence)


def test_disk_full_while_saving(config, tmp_path, monkeypatch):
    """The second checkpoint may not grow beyond 8 KB a file: writes fail as on a full disk."""
    save = trainer.Trainer._save_checkpoint
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_on_small_disk(self, *args):
        small = 1 << 13 if self.state.global_step == 2 else limit[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, limit[1]))
        try:
            save(self, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    monkeypatch.setattr(trainer.Trainer, "_save_checkpoint", save_on_small_disk)
    result = call("train", config())
    assert result.exit_code == 2
    assert is_one_sentence(result.stderr.strip()) and "the disk is full" in result.stderr
    assert [p.name for p in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-1"]
    monkeypatch.undo()
    assert call("train", "--resume", tmp_path / "out").exit_code == 0


def test_corrupted_checkpoint_at_resume(config, tmp_path):
    assert call("train", config()).exit_code == 0
    newest, older = step_dir(tmp_path / "out", 2), step_dir(tmp_path / "out", 1)
    weights = newest / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    result = call("train", "--resume", tmp_path / "out")
    assert result.exit_code == 2
    sentence = result.stderr.strip()
    assert is_one_sentence(sentence)
    assert "adapter_model.safetensors is damaged" in sentence and str(older) in sentence
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    assert call("train", "--resume", older).exit_code == 0


@pytest.mark.parametrize("change", [{"config": []}, {"config": {"model": None}}, {"data": 1}])
def test_a_manifest_that_does_not_say_what_was_trained(config, tmp_path, change):
    call("train", config())
    path = step_dir(tmp_path / "out", 2) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    result = call("train", "--resume", tmp_path / "out")
    assert (result.exit_code, is_one_sentence(result.stderr.strip())) == (2, True), result.output


def test_a_broken_log_is_told_before_the_training(config, tmp_path):
    call("train", config())
    (tmp_path / "out" / "log.jsonl").write_text("{garbage\n\n")
    result = call("train", "--resume", tmp_path / "out")
    assert (result.exit_code, "loading" in result.output) == (2, False), result.output


def test_a_tokenizer_with_more_tokens_than_the_model(config, tmp_path):
    tiny_llama(vocab=100).save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    sentence = refused(config(model={"name": str(tmp_path / "small")}), "knows only 100")
    assert is_one_sentence(sentence)


def test_rows_beyond_the_last_position_of_the_model(config, tmp_path):
    small = GPT2Config(n_embd=16, n_layer=1, n_head=1, vocab_size=320, n_positions=8)
    GPT2LMHeadModel(small).save_pretrained(tmp_path / "short")
    tiny_tokenizer().save_pretrained(tmp_path / "short")
    changed = config(model={"name": str(tmp_path / "short")})
    assert is_one_sentence(refused(changed, "data.max_length to 8"))


def test_unknown_key_and_wrong_type(config):
    assert is_one_sentence(refused(config(), "method.r", overrides=("method.rr=3",)))
    assert is_one_sentence(refused(config(), "optim.lr is 'x'", overrides=("optim.lr=x",)))


def test_a_run_folder_that_exists(done, config):
    result = call("train", config(run={"dir": str(done[1])}))
    assert result.exit_code == 2 and "exists already" in result.stderr


def test_exact_match_without_held_out_rows(config):
    assert is_one_sentence(refused(config(data={"eval_fraction": 0}), "eval.exact_match"))


@pytest.mark.parametrize(
    "words", [["train"], ["train", "--resume", "nowhere"], ["chat", "nowhere"]]
)
def test_nothing_to_work_on(words):
    result = call(*words)
    assert result.exit_code == 2 and is_one_sentence(result.stderr.strip())


# Chat.


def test_chat_answers_one_prompt_with_and_without_the_adapter(done):
    on, off = (
        call("chat", done[1], "--prompt", "say 3", "--max-new-tokens", 5, *words)
        for words in ([], ["--no-adapter"])
    )
    assert on.exit_code == off.exit_code == 0, on.output
    assert on.stdout.strip() and off.stdout.strip()


def test_chat_off_is_the_base_model_and_on_is_not(done, tiny_model_dir):
    loaded = chat.load_chat(done[1], device="cpu")
    # untrained text differs only if the adapter is strong enough, so compare logits
    for layer in loaded.model.modules():
        if hasattr(layer, "lora_B"):
            torch.nn.init.normal_(layer.lora_B["default"].weight)
    ids = torch.arange(3, 9)[None]
    base = tiny_llama(vocab=loaded.model.config.vocab_size).eval()(ids).logits
    with torch.no_grad():
        on = loaded.model(ids).logits
        chat.command(loaded, "/adapter off")
        with loaded._switched():
            off = loaded.model(ids).logits
    torch.testing.assert_close(off, base)
    assert not torch.allclose(on, base, atol=1e-2)


def test_a_conversation_switches_remembers_and_ends(done):
    lines = "hello\n/adapter off\nagain\n/new\n/what\n/exit\n"
    result = call("chat", done[1], "--max-new-tokens", 3, input=lines)
    assert result.exit_code == 0, result.output
    assert "The adapter is off." in result.stdout and "A new conversation." in result.stdout
    assert result.stdout.count("you>") == 6


def test_the_conversation_is_in_the_prompt(done):
    loaded = chat.load_chat(done[1], device="cpu", max_new_tokens=2)
    loaded.answer("first")
    loaded.turns.append({"role": "user", "content": "second"})
    prompt = loaded._prompt("second")
    assert prompt.startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert "user\nfirst" in prompt and prompt.endswith("<|im_start|>assistant\n")


def test_what_is_streamed_is_the_answer(done):
    loaded = chat.load_chat(done[1], device="cpu", max_new_tokens=8)
    pieces: list[str] = []
    assert loaded.answer("say 3", pieces.append) == "".join(pieces).strip()


@pytest.mark.parametrize("key", ["lora_alpha", "r"])
def test_d58_an_adapter_without_its_scale_is_refused(done, tmp_path, key):
    (tmp_path / "adapter").mkdir()
    for path in (done[1] / "adapter").iterdir():
        (tmp_path / "adapter" / path.name).write_bytes(path.read_bytes())
    settings = tmp_path / "adapter" / "adapter_config.json"
    tree = json.loads(settings.read_text())
    del tree[key]
    settings.write_text(json.dumps(tree))
    result = call("chat", tmp_path / "adapter", "--prompt", "x")
    assert result.exit_code == 2
    assert f"has no {key}" in result.stderr and is_one_sentence(result.stderr.strip())


def test_an_adapter_for_another_base_is_refused(done, tmp_path):
    other = save_tiny_model(tmp_path / "other", hidden=64)
    result = call("chat", done[1], "--base", other, "--prompt", "x")
    assert result.exit_code == 2
    assert "does not fit" in result.stderr and is_one_sentence(result.stderr.strip())
