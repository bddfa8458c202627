"""The command line of the benchmark, without any library: `python -m hirank.bench SUITE ...`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hirank.bench import settings
from hirank.errors import HirankError

__all__ = ["BAD_INPUT", "DISAGREES", "INTERRUPTED", "main"]

BAD_INPUT, DISAGREES, INTERRUPTED = 2, 1, 130


class Suite(NamedTuple):
    """What a suite can be asked, and where the function is that measures."""

    settings: type
    module: str
    function: str = "run"


SUITES = {
    "model": Suite(settings.Model, "model"),
    "layer": Suite(settings.Layer, "layer"),
    "norm": Suite(settings.Norm, "norm"),
    "compose": Suite(settings.Compose, "compose"),
    "prefill": Suite(settings.Prefill, "inference", "run_prefill"),
    "decode": Suite(settings.Decode, "inference", "run_decode"),
    "init": Suite(settings.Init, "init"),
    "convergence": Suite(settings.Convergence, "convergence"),
    "optim": Suite(settings.Optim, "optim_step"),
    "pretrain": Suite(settings.Pretrain, "optim_pretrain"),
    "tune": Suite(settings.Tune, "tune"),
}
# Seconds on any CPU, even a busy one: threads would wait for each other there. Records nothing.
TINY = (
    "model --model tiny --rank 64 --seq 128 --threads 1 --repeats 30 --limit 5 --out none".split()
)
TINY_ARMS = "--arms peft-lora,peft-dora,hirank-lora,hirank-dora".split()


def main(arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Measure, record, and say a table. Returns the exit code; bad input is said, not raised."""
    try:
        given = _parser().parse_args(_expanded(arguments))
        return _run(given, arguments, say)
    except HirankError as error:
        say(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        say("Interrupted; what was recorded before is whole.")
        return INTERRUPTED


def _expanded(arguments: Sequence[str]) -> list[str]:
    """`--tiny ...` and `tiny ...` are short for a small `model`."""
    words = list(arguments)
    for name in ("--tiny", "tiny"):
        if name in words[:2]:
            words.remove(name)
            return [*TINY, *TINY_ARMS, *words]
    return words


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hirank bench",
        description="Measure stock PEFT and hirank side by side. `tiny` takes a few seconds.",
    )
    suites = parser.add_subparsers(dest="suite", metavar="SUITE", required=True)
    suites.add_parser("tiny", help="a small model on the CPU, in a few seconds; records nothing")
    for name, suite in SUITES.items():
        about = (suite.settings.__doc__ or "").strip()
        one = suites.add_parser(name, help=about, description=about)
        _add_common(one)
        settings.add_options(one, suite.settings)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--cpu", dest="device", action="store_const", const="cpu")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU; [PyTorch's choice]")
    parser.add_argument("--arms", metavar="ARM[,...]", help="only these, in this order")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds that count")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="rounds that do not")
    parser.add_argument(
        "--limit",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="begin no further round after this time, once three are measured",
    )
    parser.add_argument(
        "--out", default="benchmarks/results", metavar="DIR", help="or none; [benchmarks/results]"
    )
    parser.add_argument("--commit", help="what to record where git cannot tell")


def _run(given: argparse.Namespace, arguments: Sequence[str], say: Callable[[str], None]) -> int:
    suite = SUITES[given.suite]
    wanted = list(settings.combinations(suite.settings, given))
    if given.repeats < 1 or given.warmup < 0:
        raise HirankError(
            f"--repeats got {given.repeats}, --warmup {given.warmup}: give at least 1 and 0."
        )
    module = importlib.import_module(f"hirank.bench.{suite.module}")
    session = _session(given, module.ARMS, say)
    facts = _facts(session.device, given.commit, arguments)
    agreed = True
    for index, one in enumerate(wanted, 1):
        say(f"{given.suite} {index}/{len(wanted)}: {_shown(one)}")
        found = getattr(module, suite.function)(one, session)
        agreed &= all(result.agrees for result in found)
        _keep(given, one, found, facts, say)
        session.tidy()
    if not agreed:
        say("An arm is too far from the truth (see above): no speed-up is claimed for it.")
    return 0 if agreed else DISAGREES


def _session(
    given: argparse.Namespace, available: Sequence[str], say: Callable[[str], None]
) -> Any:
    import torch

    from hirank.bench.session import Session

    if given.device == "cuda" and not torch.cuda.is_available():
        raise HirankError("--device cuda, but PyTorch sees no GPU here: leave the option out.")
    gpu = given.device != "cpu" and torch.cuda.is_available()
    arms = tuple(given.arms.split(",")) if given.arms else None
    for name in arms or ():
        if name not in available:
            raise HirankError(f"--arms got {name!r}: choose from {', '.join(available)}.")
    if given.threads is not None:
        torch.set_num_threads(max(1, given.threads))
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    return Session(device, arms, given.repeats, given.warmup, given.limit, say)


def _facts(device: Any, commit: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    from hirank.bench import record

    return {
        "device": record.device_facts(device),
        "versions": record.version_facts(),
        **record.source_facts(commit),
        "command": record.command_line(arguments),
    }


def _keep(
    given: argparse.Namespace,
    one: Any,
    found: Sequence[Any],
    facts: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    from hirank.bench import record, tables

    if not found:
        return
    lines = record.records(given.suite, one, found, facts)
    say(tables.table(lines))
    if given.out != "none":
        say(f"added to {record.append(Path(given.out), given.suite, lines)}")


def _shown(one: Any) -> str:
    from dataclasses import asdict

    from hirank.bench.tables import written

    return ", ".join(f"{name} {written(value)}" for name, value in asdict(one).items())
