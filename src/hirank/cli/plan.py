"""`hirank plan`: peak memory before anything is loaded, and what to change so that it fits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hirank.cli.common import FOUND, Set, console, told
from hirank.errors import HirankError

if TYPE_CHECKING:
    from hirank.plan.calibration import Measured
    from hirank.plan.inventory import Shape
    from hirank.plan.ledger import Ledger, Overhead
    from hirank.plan.setting import Setting

__all__ = ["mount", "plan"]

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL|CONFIG",
        help="A name such as qwen2.5-7b, a config.json, a model folder, a model in the Hub's cache "
        "here, or the YAML file of a run.",
    ),
]
Memory = Annotated[str | None, typer.Option("--gpu", metavar="SIZE", help="24GiB, 80GB or h100.")]


def mount(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(plan)


@told
def plan(
    model: Model = None,
    gpu: Memory = None,
    fit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Find the least change that fits into so much memory."),
    ] = None,
    max_: Annotated[
        str | None,
        typer.Option("--max", metavar="WHAT", help="The largest seq, batch or rank for --gpu."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="All methods side by side.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print each formula with its numbers.")
    ] = False,
    method: Annotated[str | None, typer.Option(help="full, lora, dora, qlora, galore, ...")] = None,
    rank: Annotated[int | None, typer.Option(help="Of the adapter or the projection.")] = None,
    targets: Annotated[
        str | None, typer.Option(metavar="NAMES", help="all-linear, or q_proj,v_proj.")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in the longest row.")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows in one forward pass.")] = None,
    accum: Annotated[int | None, typer.Option(help="Forward passes in a step.")] = None,
    checkpointing: Annotated[
        bool | None, typer.Option(help="Compute activations twice instead of keeping them.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the base: bf16 or fp32.")] = None,
    adapter_dtype: Annotated[str | None, typer.Option(help="Of A and B: fp32 or bf16.")] = None,
    autocast: Annotated[bool | None, typer.Option(help="bf16 autocast around forward.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw or sgd.")] = None,
    state: Annotated[str | None, typer.Option(help="Moments: fp32, bf16 or int8.")] = None,
    step: Annotated[str | None, typer.Option(help="AdamW's: fused, foreach or loop.")] = None,
    step_in_backward: Annotated[
        bool | None, typer.Option(help="galore and its kind: move weights in backward.")
    ] = None,
    attention: Annotated[str | None, typer.Option(help="sdpa, flash or eager.")] = None,
    loss: Annotated[str | None, typer.Option(help="trl, chunked or plain.")] = None,
    packing: Annotated[bool | None, typer.Option(help="Rows without padding.")] = None,
    eval_batch: Annotated[int | None, typer.Option(help="Rows in an evaluation pass.")] = None,
    world: Annotated[int | None, typer.Option(help="GPUs.")] = None,
    sharding: Annotated[
        str | None, typer.Option(help="none, ddp, fsdp2, zero1, zero2 or zero3.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="closed: formulas, at once. trace: the real code, in seconds.")
    ] = "closed",
    set_: Set = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with pictures.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    models: Annotated[bool, typer.Option("--models", help="List the known models.")] = False,
    calibration: Annotated[
        bool, typer.Option("--calibration", help="List what runs on this machine needed.")
    ] = False,
    calibration_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where that is written down, if not in the user's cache."
        ),
    ] = None,
) -> None:
    """Say how much memory a run will need. Nothing is loaded. Exit code 1: it does not fit."""
    if models:
        return _list_models()
    answers = {"--max": max_ is not None, "--compare": compare, "--fit": fit is not None}
    details = {"--explain": explain, "--html": html is not None, "--engine": engine != "closed"}
    _refuse_two_questions(answers, details)
    measured = _measured(calibration_file)
    if calibration:
        return _show_calibration(measured, json_)
    given = {
        "method": method, "rank": rank, "targets": _targets(targets), "sequence": seq,
        "batch": batch, "accumulation": accum, "checkpointing": checkpointing,
        "base_dtype": dtype, "adapter_dtype": adapter_dtype, "autocast": autocast,
        "optimizer": optimizer, "state_dtype": state, "step": step,
        "step_in_backward": step_in_backward, "attention": attention, "loss": loss,
        "packing": packing, "eval_batch": eval_batch, "world": world, "sharding": sharding,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    setting, shape = _setting(model, given, list(set_ or []))
    capacity, overhead = _capacity(gpu, fit, max_), _overhead(measured)
    if max_ is not None:
        return _show_largest(max_, setting, shape, capacity, overhead, json_)
    if compare:
        return _show_comparison(setting, shape, capacity, overhead, json_)
    ledger = replace(_ledger(setting, shape, engine), overhead=overhead)
    if fit is not None and capacity is not None:
        return _show_fit(setting, shape, capacity, overhead, json_)
    here = _off(measured, setting)
    _show(setting, shape, ledger, capacity, here, explain=explain, as_json=json_)
    if html is not None:
        _write_page(html, setting, shape, ledger, capacity, quietly=json_)
    _leave(ledger, capacity)


# What is asked.


def _refuse_two_questions(answers: dict[str, bool], details: dict[str, bool]) -> None:
    """--max takes its size from --fit too; a plan's details go with no other answer."""
    asked = [name for name in answers if answers[name]]
    beside = [name for name in details if details[name]]
    if len(asked) > 1 and "--compare" in asked:
        raise HirankError(f"{asked[0]} and {asked[1]} are two questions; ask one at a time.")
    if asked and beside:
        raise HirankError(
            f"{beside[0]} belongs to a plan, not to {asked[0]}; leave one of them out."
        )


def _targets(text: str | None) -> str | tuple[str, ...] | None:
    if text is None or text in ("all-linear", "all"):
        return None if text is None else "all-linear"
    names = [name.strip() for name in text.split(",")]
    return tuple(names) if all(name.replace("_", "").isalnum() for name in names) else text


def _setting(
    model: str | None, given: dict[str, Any], overrides: list[str]
) -> tuple[Setting, Shape]:
    from hirank.plan.find import find_shape
    from hirank.plan.setting import Setting

    if model is None:
        raise HirankError("Give a model, such as qwen2.5-7b, or a configuration; see --models.")
    if Path(model).suffix in (".yaml", ".yml"):
        base = _of_config(Path(model), overrides)
        shape = find_shape(base.model)
        if given.get("method", base.method) != base.method:
            base = replace(base, **_usual({"method": given["method"]}))
    elif overrides:
        raise HirankError("--set changes the YAML file of a run; use options such as --rank here.")
    else:
        shape = find_shape(model)
        base = Setting(model, **_usual(given))
    if shape.softcapped and base.attention == "sdpa":
        given = {"attention": "eager", **given}
    return replace(base, **given), shape


def _usual(given: dict[str, Any]) -> dict[str, Any]:
    """What follows from a method if nothing else is said, as in `hirank train`."""
    from hirank.plan.compare import USUAL_RANK
    from hirank.plan.setting import METHODS

    method = given.get("method", "dora")
    usual: dict[str, Any] = {"method": method}
    if method == "full":
        usual["base_dtype"] = "fp32"
    if method in USUAL_RANK:
        usual["rank"] = USUAL_RANK[method]
    if (given.get("world") or 1) > 1:
        usual |= {"sharding": "ddp", "world": given["world"]}
    return usual if method in METHODS else {}


def _of_config(path: Path, overrides: list[str]) -> Setting:
    try:
        from hirank.train.config import load_config, resolved
    except ModuleNotFoundError as error:
        raise HirankError(
            f"The configuration of a run needs {error.name}; pip install 'hirank[train]', or give "
            "the model's name and options."
        ) from None
    from hirank.train.planned import setting_of

    return setting_of(resolved(load_config(path, overrides)))


def _capacity(gpu: str | None, fit: str | None, max_: str | None) -> int | None:
    from hirank.plan.sizes import read_memory

    if gpu is not None and fit is not None:
        raise HirankError("--gpu and --fit both name a size of memory; give one of them.")
    if max_ is not None and gpu is None and fit is None:
        raise HirankError("--max needs the size of the memory; add --gpu 24GiB.")
    size = gpu if gpu is not None else fit
    return None if size is None else read_memory(size)


def _ledger(setting: Setting, shape: Shape, engine: str) -> Ledger:
    from hirank.plan.closed import closed_form

    if engine == "closed":
        return closed_form(setting, shape)
    if engine != "trace":
        raise HirankError(f"--engine {engine}: it is closed or trace.")
    from hirank.plan.trace import trace_of

    closed_form(setting, shape)  # refuses what cannot be, in a sentence
    return trace_of(setting)


# What was measured here.


def _measured(file: Path | None) -> list[Measured]:
    from hirank.plan.calibration import calibration_file, recall

    if file is not None and not file.is_file():
        raise HirankError(f"There is no file {file}; leave out --calibration-file, or mend it.")
    place = file if file is not None else calibration_file()
    return [] if place is None else recall(place)


def _overhead(measured: list[Measured]) -> Overhead:
    from hirank.plan.calibration import overhead_of
    from hirank.plan.ledger import ESTIMATED

    return overhead_of(measured) or ESTIMATED


def _off(measured: list[Measured], setting: Setting) -> str | None:
    from hirank.plan.calibration import off_line

    return off_line(measured, setting.method)


def _show_calibration(measured: list[Measured], as_json: bool) -> None:
    from hirank.plan.table import calibration_lines

    if as_json:
        return _json([vars(run) for run in measured])
    if measured:
        return _print(calibration_lines(measured))
    print("Nothing was measured here yet: hirank train writes it down after runs on a GPU.")


# What is shown.


def _show(
    setting: Setting,
    shape: Shape,
    ledger: Ledger,
    capacity: int | None,
    here: str | None,
    *,
    explain: bool,
    as_json: bool,
) -> None:
    from hirank.plan.fit import advice, fits
    from hirank.plan.table import explain_lines, plan_lines

    said = advice(setting, shape, ledger)
    if as_json:
        fit = None if capacity is None else fits(ledger, capacity)
        whole = {"model": shape.name, "parameters": shape.parameters, "setting": vars(setting)}
        return _json({**whole, **ledger.as_dict(), "fits": fit, "advice": said, "here": here})
    _print(plan_lines(setting, shape, ledger, capacity, said))
    _print([] if here is None else [f"{here}."])
    if explain:
        _print(["", *explain_lines(ledger)])


def _show_largest(
    what: str,
    setting: Setting,
    shape: Shape,
    capacity: int | None,
    overhead: Overhead,
    as_json: bool,
) -> None:
    from hirank.plan.fit import largest
    from hirank.plan.sizes import gib

    assert capacity is not None
    found = largest(what, setting, shape, capacity, overhead)
    if as_json:
        _json({"max": what, "value": found, "capacity": capacity})
    elif found:
        print(f"The largest {what} that fits into {gib(capacity)} is {found:,}.")
    else:
        print(f"Not even {what} 1 fits into {gib(capacity)}; try --fit instead.")
    if not found:
        raise typer.Exit(FOUND)


def _show_comparison(
    setting: Setting, shape: Shape, capacity: int | None, overhead: Overhead, as_json: bool
) -> None:
    from hirank.plan.compare import comparison
    from hirank.plan.table import about, compare_lines

    rows = comparison(setting, shape, overhead)
    if as_json:
        found = [{"method": r.name, "trained": r.trained, **_sizes(r.ledger)} for r in rows]
        return _json({"model": shape.name, "methods": found})
    _print([about(setting, shape), "", *compare_lines(rows, capacity)])


def _show_fit(
    setting: Setting, shape: Shape, capacity: int, overhead: Overhead, as_json: bool
) -> None:
    from hirank.plan.fit import fit
    from hirank.plan.table import about, fit_lines

    found = fit(setting, shape, capacity, overhead)
    if as_json:
        steps = [] if found is None else found.steps
        changes = [{**made.values, "cost": made.cost, **_sizes(led)} for made, led in steps]
        _json({"fits": found is not None, "changes": changes})
    else:
        _print([about(setting, shape), *fit_lines(found, capacity)])
    if found is None:
        raise typer.Exit(FOUND)


def _sizes(ledger: Ledger) -> dict[str, Any]:
    whole = ledger.as_dict()
    return {key: whole[key] for key in ("allocated", "reserved", "process", "moment")}


def _list_models() -> None:
    from hirank.plan.catalogue import CATALOGUE
    from hirank.plan.inventory import read_shape
    from hirank.plan.table import model_lines

    known = ((read_shape(e.config, name), e.repository) for name, e in CATALOGUE.items())
    _print(model_lines(known))


def _write_page(
    path: Path,
    setting: Setting,
    shape: Shape,
    ledger: Ledger,
    capacity: int | None,
    *,
    quietly: bool,
) -> None:
    from importlib.util import find_spec

    if find_spec("plotly") is None:
        raise HirankError("--html needs Plotly for its pictures; pip install 'hirank[train]'.")
    from hirank.plan.fit import advice
    from hirank.plan.page import write_page

    said = advice(setting, shape, ledger)
    written = write_page(path, setting, shape, ledger, capacity, said)
    if not quietly:
        print(f"Page: {written}")


def _print(lines: Iterable[Any]) -> None:
    terminal = console()
    for line in lines:
        terminal.print(line, soft_wrap=False, highlight=False)


def _json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _leave(ledger: Ledger, capacity: int | None) -> None:
    from hirank.plan.fit import fits

    if capacity is not None and not fits(ledger, capacity):
        raise typer.Exit(FOUND)
