"""`hirank audit`: what a fine-tune decides silently, computed. One subcommand for each question."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hirank.cli import audit_adapter
from hirank.cli.common import console, told
from hirank.errors import HirankError

if TYPE_CHECKING:
    from hirank.audit.scaling import Advice

__all__ = ["audit", "mount"]

audit = typer.Typer(cls=audit_adapter.AdapterFirst, no_args_is_help=True)


def mount(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    audit_adapter.mount(audit)
    app.add_typer(audit, name="audit", help="Say what was trained: steps, rank, gains.")


@audit.callback()
def _audit() -> None:
    """Say what was trained: steps, rank, gains."""


# Steps.

ROWS = 4
"""Rows of the batch that a step is measured with."""

AsSetting = "Rank and alpha: r16a32. :lora, :rslora or :dora behind it overrides the options."


@audit.command()
@told
def scaling(
    from_: Annotated[str, typer.Option("--from", metavar="SETTING", help=AsSetting)],
    to: Annotated[str, typer.Option("--to", metavar="SETTING", help="What to change to: r64a64.")],
    optimizer: Annotated[str, typer.Option(help="sgd, adamw and its kind.")] = "adamw",
    rslora: Annotated[
        bool, typer.Option("--rslora", help="rsLoRA: scale alpha / sqrt(r).")
    ] = False,
    dora: Annotated[bool, typer.Option("--dora", help="DoRA: with trained magnitudes.")] = False,
    lora_plus_ratio: Annotated[
        float, typer.Option(min=0, help="LoRA+ in --to: learning rate of B over that of A.")
    ] = 1.0,
    lr: Annotated[float | None, typer.Option(min=0, help="Learning rate of --from.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Measure both first steps on this model.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Training rows to measure them with.")
    ] = None,
) -> None:
    """Say which learning rate or alpha keeps the first step when rank or method change."""
    from hirank.audit.scaling import compared
    from hirank.audit.scaling import told as as_text

    if (model is None) != (data is None):
        raise HirankError("To measure the steps, give both: --model and --data.")
    advice = compared(
        from_, to, optimizer, rslora=rslora, dora=dora, lr=lr, b_ratio=lora_plus_ratio
    )
    print(as_text(advice, optimizer, lr=lr is not None))
    if model is not None and data is not None:
        print(_measured(advice, optimizer, model, data))


def _measured(advice: Advice, optimizer: str, model: str, data: Path) -> str:
    from hirank.audit.first_step import first_steps
    from hirank.train.quiet import quiet

    with quiet(console()):
        loaded, batch = _model_and_batch(model, data)
        settings = [advice.before, advice.after]
        one, other = first_steps(loaded, settings, batch, optimizer=optimizer)
    return (
        f"Measured on {Path(model).name} with {len(batch['input_ids'])} rows: "
        f"|dW| {one:.4g} and {other:.4g}, {other / one:.3g} times."
    )


def _model_and_batch(name: str, data: Path) -> tuple[Any, Any]:
    """The model, and the first rows of the data as it takes them."""
    from hirank.train.data import DataConfig, load_examples
    from hirank.train.model import ModelConfig, load_model, load_tokenizer
    from hirank.train.packing import collator_for
    from hirank.train.quiet import without_bars
    from hirank.train.tokens import encode

    settings, rows = ModelConfig(name=name), DataConfig(train=[data], eval_fraction=0)
    examples = load_examples(rows).train[:ROWS]
    without_bars()
    tokenizer = load_tokenizer(settings)
    encoded = encode(examples, tokenizer, rows).dataset
    model = load_model(settings)
    batch = collator_for(model, tokenizer, packing=False)(list(encoded))
    return model, {key: value.to(model.device) for key, value in batch.items()}


# Rank, from two runs.


@audit.command()
@told
def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run of hirank train.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The same with another rank.")],
    json_: Annotated[bool, typer.Option("--json", help="Print the reasons as JSON.")] = False,
) -> None:
    """Say whether rank is what holds a run back, from the curves of two ranks."""
    import json
    from dataclasses import asdict

    from hirank.train.compare import compare as compare_runs

    found = compare_runs(run_a, run_b)
    print(json.dumps(asdict(found), indent=2) if json_ else found)
