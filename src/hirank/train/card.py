"""The model card of a run: README.md in the run folder, as hubs and people read it.

The front matter holds only what is sure. `base_model` is a Hub name; a base that lies in a folder
has no such name, so the card then says which folder it was and what to fill in before publishing.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from hirank.files import write_text
from hirank.page.units import bytes_text, count_text, duration_text, percent_text
from hirank.train import lowrank
from hirank.train.method import METHODS
from hirank.train.summary import Change, Summary, load_summary

__all__ = ["chat_command", "load_code", "resume_command", "write_card"]

METHOD_NAMES = {
    "lora": "LoRA",
    "rslora": "rsLoRA",
    "dora": "DoRA",
    "full": "full fine-tuning",
    "galore": "GaLore",
    "qgalore": "Q-GaLore",
    "fira": "Fira",
    "apollo": "APOLLO",
    "apollo-mini": "APOLLO-Mini",
}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def write_card(run_dir: Path) -> Path:
    """Write `run_dir/README.md` from the run's log, settings and versions; whole or not at all.

    Raises HirankError when there is no readable log or the folder cannot be written.
    """
    return write_text(run_dir / "README.md", card_text(load_summary(run_dir)))


def card_text(run: Summary) -> str:
    """The card: YAML front matter, then Markdown."""
    front = yaml.safe_dump(front_matter(run), sort_keys=False, allow_unicode=True)
    parts = [_intro(run), _loading(run), _data(run), _training(run), _results(run), _versions(run)]
    return f"---\n{front}---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def front_matter(run: Summary) -> dict[str, Any]:
    """What a hub reads: base model, library, task and tags."""
    base, adapter = hub_name(run), is_adapter(run)
    front: dict[str, Any] = {}
    if base:
        front |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    method = str(run.value("method", "name", "dora"))
    front["library_name"] = "peft" if adapter else "transformers"
    front["pipeline_tag"] = "text-generation"
    front["tags"] = [tag for tag in ("hirank", method, "lora" if adapter else None) if tag]
    front["tags"] = list(dict.fromkeys(front["tags"]))
    return front


# Facts that the report uses as well.


def is_adapter(run: Summary) -> bool:
    """False if all weights were trained."""
    method = METHODS.get(str(run.value("method", "name", "dora")))
    return method is None or method.adapter


def is_low_rank(run: Summary) -> bool:
    """True if all weights were trained by an optimiser that keeps little of a gradient."""
    method = METHODS.get(str(run.value("method", "name", "dora")))
    return method is not None and method.optimizer is not None


def hub_name(run: Summary) -> str | None:
    """The base model's name on the Hub, None if it was a local folder or file."""
    name = run.model_name
    known = name != "unknown model" and HUB_NAME.fullmatch(name) is not None
    return name if known and not name.endswith(".gguf") and not Path(name).exists() else None


def method_text(run: Summary) -> str:
    """`DoRA, r = 64, alpha = 128`; `GaLore on all weights, r = 128, scale = 0.25`."""
    name = str(run.value("method", "name", "dora"))
    parts = [METHOD_NAMES.get(name, name)]
    if is_low_rank(run):
        parts[0] += " on all weights"
    if is_adapter(run) or is_low_rank(run):
        keys = ("r", "alpha") if is_adapter(run) else ("r", "scale")
        found = ((key, run.value("method", key)) for key in keys)
        parts += [f"{key} = {value:g}" for key, value in found if isinstance(value, int | float)]
    return ", ".join(parts)


def result_dir(run: Summary) -> str:
    """Folder of the best weights in the run folder, of the last ones if none are marked best."""
    last = "adapter" if is_adapter(run) else "model"
    return f"{last}-best" if (run.run_dir / f"{last}-best").is_dir() else last


def load_code(run: Summary, folder: str) -> str:
    """Python that loads the result with stock PEFT and Transformers, nothing of ours."""
    if not is_adapter(run):
        return (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f"model = AutoModelForCausalLM.from_pretrained({folder!r})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({folder!r})"
        )
    return (
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"base = AutoModelForCausalLM.from_pretrained({_base_arguments(run)})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({folder!r})\n"
        f"model = PeftModel.from_pretrained(base, {folder!r})"
    )


def _base_arguments(run: Summary) -> str:
    path = Path(run.model_name)
    if path.suffix == ".gguf":
        return f"{str(path.parent)!r}, gguf_file={path.name!r}"
    return repr(run.model_name)


def chat_command(run: Summary) -> str:
    """Shell line that tries the result."""
    return f"hirank chat {shlex.quote(str(run.run_dir))}"


def resume_command(run: Summary) -> str:
    """Shell line that goes on from the last checkpoint."""
    return f"hirank train --resume {shlex.quote(str(run.run_dir))}"


# Sections.


def _intro(run: Summary) -> str:
    what = "adapter for" if is_adapter(run) else "version of"
    lines = [f"# {_inline(run.run_dir.resolve().name)}"]
    lines.append(
        f"{_inline(method_text(run))} {what} {_code(run.model_name)}, trained with hirank."
    )
    if hub_name(run) is None:
        lines.append(
            "The base model was read from a local folder. Before publishing, add its Hub name as "
            "`base_model` above."
        )
    return "\n\n".join(lines)


def _loading(run: Summary) -> str:
    code = _fenced(load_code(run, result_dir(run)), "python")
    chat = _fenced(chat_command(run), "bash")
    return f"## How to load it\n\nFrom this folder:\n\n{code}\n\nOr in a terminal:\n\n{chat}"


def _data(run: Summary) -> str:
    names = [*_paths(run.value("data", "train")), *_paths(run.value("data", "eval"))]
    rows = [f"- {_code(name)}" for name in names]
    sizes = [f"{run.start[key]:,} {text}" for key, text in _SIZES if key in run.start]
    if sizes:
        rows.append(f"- {' and '.join(sizes)}")
    return "## Data\n\n" + "\n".join(rows) if rows else ""


_SIZES = (("n_train", "training examples"), ("n_eval", "held-out examples"))


def _paths(value: Any) -> list[str]:
    """Names of data files, without the folders of the machine they were read on."""
    values = value if isinstance(value, list) else [value] if value else []
    return [Path(str(item)).name for item in values]


def _training(run: Summary) -> str:
    settings = {"method": method_text(run)}
    if run.optimizer:
        settings["optimizer"] = run.optimizer
    for section in ("method", "optim", "data"):
        part = run.config.get(section)
        names = _SHOWN["low-rank" if section == "method" and is_low_rank(run) else section]
        settings |= {n: part[n] for n in names if isinstance(part, dict) and _told(part.get(n))}
    return "## Training\n\n" + _table(("setting", "value"), settings)


_SHOWN = {
    "method": ("target_modules", "dropout"),
    "low-rank": ("target_modules", *lowrank.CHOICES, "step_in_backward"),
    "optim": (
        "name", "lr", "scheduler", "warmup", "epochs", "max_steps", "batch_size", "grad_accum",
        "weight_decay", "clip", "seed",
    ),
    "data": ("max_length", "packing", "train_on_prompt"),
}  # fmt: skip


def _told(value: Any) -> bool:
    return value is not None and value != []


def _results(run: Summary) -> str:
    found: dict[str, str | None] = {
        "exact match on held-out data": _change(run.exact_match, percent_text),
        "loss on held-out data (first, best)": _change(run.eval_loss, "{:.4f}".format),
        "training loss (first, last)": _change(run.train_loss, "{:.4f}".format),
        "best weights": best_text(run),
        "optimizer steps": f"{run.last_step:,}" if run.steps else None,
        "training time": duration_text(run.seconds) if run.seconds else None,
        "median speed": f"{run.tokens_per_s:,.0f} tokens/s" if run.tokens_per_s else None,
        "peak memory": bytes_text(run.peak_memory) if run.peak_memory else None,
        "trained parameters": trainable_text(run),
        "steps of a parameter skipped, gradient not finite": f"{run.skipped:,}"
        if run.skipped
        else None,
    }
    rows = {name: value for name, value in found.items() if value is not None}
    return "## Results\n\n" + _table(("measure", "value"), rows) if rows else ""


def best_text(run: Summary) -> str | None:
    """`from step 160`, None if no evaluation chose the best weights."""
    step = (run.end or {}).get("best_step")
    return f"from step {step:,}" if isinstance(step, int) else None


def trainable_text(run: Summary) -> str | None:
    """`19.5 M of 154.0 M (12.7 %)`."""
    trained, total = run.start.get("trainable_params"), run.start.get("total_params")
    if not trained or not total:
        return None
    return f"{count_text(trained)} of {count_text(total)} ({percent_text(trained / total)})"


def _change(change: Change | None, form: Any) -> str | None:
    if change is None:
        return None
    before = "" if change.before is None else f"{form(change.before)} → "
    return f"{before}{form(change.after)} (step {change.step:,})"


def _versions(run: Summary) -> str:
    return "## Versions\n\n" + _table(("package", "version"), run.versions) if run.versions else ""


# Markdown in which no value can be more than text.


def _table(head: tuple[str, str], rows: dict[str, Any]) -> str:
    body = [f"| {_inline(str(name))} | {_inline(str(value))} |" for name, value in rows.items()]
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *body])


def _inline(text: str) -> str:
    """Text with every sign that Markdown or HTML would act on made harmless."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"[\\`*\[\]|#~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", flat)


def _code(text: str) -> str:
    """Inline code, fenced by more backticks than the text has in a row."""
    flat = " ".join(text.split())
    fence = "`" * (_longest_ticks(flat) + 1)
    pad = " " if "`" in flat else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, _longest_ticks(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_ticks(text: str) -> int:
    return max((len(ticks) for ticks in re.findall("`+", text)), default=0)
