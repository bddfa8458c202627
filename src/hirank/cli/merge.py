"""`hirank merge`: an adapter folded into its base model, with a verdict on what that keeps."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hirank.cli.common import FOUND, console, told
from hirank.errors import HirankError

if TYPE_CHECKING:
    from hirank.audit.served import Prompt

__all__ = ["as_text", "local_folder", "merge", "merged", "mount"]

Kinds = "nf4, nf4-double, fp4, fp4-double or int8"


def mount(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(merge)


@told
def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A LoRA or DoRA folder.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write the merged model; new.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base model's folder, if it is not where ADAPTER says.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of all weights: bfloat16, float16 or float32; else as the base."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Compute and judge the merge, write nothing.")
    ] = False,
    stochastic: Annotated[
        int | None,
        typer.Option(
            metavar="SEED",
            min=0,
            max=2**32 - 1,
            help="Round to bfloat16 up or down by chance, right on average; SEED: any number.",
        ),
    ] = None,
    trained_on: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help=f"Merge into the weights that a quantised training saw: {Kinds}.",
        ),
    ] = None,
    into_original: Annotated[
        bool,
        typer.Option(
            "--into-original",
            help="With --trained-on: into the base's own weights; tells how far they are off.",
        ),
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rows as hirank train takes them: how likely are their answers before and after?",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Load the merged folder and compare its logits.")
    ] = True,
    force: Annotated[
        bool,
        typer.Option("--force", help="Keep the folder though the verdict is DESTROYED."),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Fold ADAPTER into its base model: a folder that plain Transformers loads, and a verdict.

    Safe, lossy or destroyed: how much of what was trained the rounding takes. Exit code 1: the
    merge would not keep what was trained (destroyed, or --check finds that the gain is lost).
    """
    if (out is None) == (not dry_run):
        raise HirankError("Give either --out FOLDER, or --dry-run to write nothing.")
    if dry_run and check is not None:
        raise HirankError("--check reads the merged folder: give --out instead of --dry-run.")
    if into_original and trained_on is None:
        raise HirankError("--into-original goes with --trained-on: say what was trained on.")
    from hirank.audit.merge_run import as_json
    from hirank.train.quiet import quiet, without_bars

    with quiet(console()):
        without_bars()
        plan_options = (base, dtype, stochastic, trained_on, into_original)
        report = merged(adapter, out, plan_options, check, verify, force)
    print(as_json(report) if json_ else as_text(report))
    if report["fidelity"]["verdict"] == "destroyed" or not report.get("check", {}).get(
        "good", True
    ):
        raise typer.Exit(FOUND)


def merged(
    adapter_dir: Path,
    out: Path | None,
    options: tuple[str | None, str | None, int | None, str | None, bool],
    check: Path | None,
    verify: bool,
    force: bool,
) -> dict[str, Any]:
    """Do it; the report of `merge_and_measure`. `options`: those of the plan, in its order."""
    from hirank.adapters.base_files import BaseFolder
    from hirank.adapters.few_bits import dense_copy
    from hirank.adapters.files import AdapterFolder
    from hirank.adapters.merge_plan import Rounding, plan_merge
    from hirank.audit.merge_run import merge_and_measure
    from hirank.train.chat import base_of

    base, dtype, seed, trained_on, into_original = options
    adapter = AdapterFolder(adapter_dir)
    folder = local_folder(base or base_of(adapter_dir))
    prompts = _prompts(folder, check) if check is not None else None
    rounding = Rounding(_dtype(dtype), seed)
    with tempfile.TemporaryDirectory(prefix="hirank-merge-") as place:
        opened = BaseFolder(folder)
        if opened.config.get("quantization_config") is not None:
            opened = dense_copy(folder, Path(place))
        plan = plan_merge(opened, adapter, rounding, trained_on=trained_on)
        if into_original:
            plan = plan.into_original()
        return merge_and_measure(plan, out, prompts=prompts, verify=verify, force=force)


def local_folder(name: str) -> Path:
    """The folder of a model that is on this machine: a path, or a Hub name in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    from hirank.train.model import locate

    source = locate(name)
    if source.gguf:
        raise HirankError(f"{source.path} is GGUF: give the model's folder of safetensors.")
    if source.local:
        return Path(source.name)
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        raise HirankError(
            f"{name} is not on this machine: download it first (hf download {name}), or give "
            "its folder with --base."
        ) from None


def _dtype(name: str | None) -> Any:
    import torch

    if name is None:
        return None
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    known |= {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name not in known:
        raise HirankError(f"--dtype got {name!r}: choose from bfloat16, float16, float32.")
    return known[name]


def _prompts(base: Path, file: Path) -> list[Prompt]:
    """The rows of a file as `hirank train` reads them: the answers are scored."""
    from hirank.audit.served import Prompt
    from hirank.train.data import DataConfig, load_examples
    from hirank.train.model import ModelConfig, load_tokenizer
    from hirank.train.tokens import encode

    rows = DataConfig(train=[file], eval_fraction=0)
    tokenizer = load_tokenizer(ModelConfig(name=str(base)))
    encoded = encode(load_examples(rows).train, tokenizer, rows).dataset
    return [Prompt(row["input_ids"], [label != -100 for label in row["labels"]]) for row in encoded]


def as_text(report: dict[str, Any]) -> str:
    """The report, for the terminal."""
    fidelity = report["fidelity"]
    lines = [
        f"{fidelity['verdict'].upper()}: {fidelity['advice']}",
        "",
        *_table(fidelity),
        "",
        *(report[part]["told"] for part in ("gap", "verified", "check") if part in report),
        f"Written: {report['out']}" if report["out"] else "Nothing was written.",
    ]
    return "\n".join(lines)


ROWS = 8
COLUMNS = ("change", "distortion", "largest", "swallowed")


def _table(fidelity: dict[str, Any]) -> list[str]:
    """The layers that lose most, then all together."""
    worst = sorted(fidelity["layers"], key=lambda layer: -layer["distortion"])
    shown = [*worst[:ROWS], fidelity["total"]]
    width = max(len(layer["name"]) for layer in shown)
    head = f"{'layer':<{width}}" + "".join(f"{name:>12}" for name in COLUMNS)
    rows = [
        f"{layer['name']:<{width}}" + "".join(f"{100 * layer[c]:>10.3g} %" for c in COLUMNS)
        for layer in shown
    ]
    more = len(worst) - ROWS
    if more > 0:
        rows.insert(ROWS, f"({more} layers that lose less)")
    legend = (
        "change: increment / weight; distortion and largest: RMS and largest error of the "
        "increment / its RMS; swallowed: increments rounded away."
    )
    return [head, *rows, legend]
