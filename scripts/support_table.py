"""Write docs/support.md: what hirank does for each kind of layer, tried out one by one.

    python scripts/support_table.py [--check]

Every cell is a run of a tiny layer on the CPU: hirank computes it (`explain` says so), it is left
to PEFT, or it is refused, and then the page quotes the sentence. --check changes nothing and fails
if the page is not current. Writing needs bitsandbytes, hqq and torchao; a check skips what is not
installed.
"""

import argparse
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

import hirank
from hirank.kernels import _tuning
from support_layers import KINDS, available
from support_trials import OPERATIONS, Operation, Trial

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"
CPU = torch.device("cpu")
TRIED = (torch.float32, torch.bfloat16)
REFUSALS = (hirank.HirankError, ValueError, NotImplementedError, TypeError, RuntimeError)


# What came of it.


class Outcome(NamedTuple):
    word: str
    """"yes": hirank computes it. "PEFT": PEFT's own code does. "no": refused."""
    text: str
    """Why it is left to PEFT, or the sentence that refuses."""


Outcomes = dict[tuple[str, str], Outcome]


def tried(
    kinds: list[str], names: Iterable[str] = OPERATIONS, dtypes: tuple[torch.dtype, ...] = TRIED
) -> Outcomes:
    """These operations on each of these layers.

    Raises:
        RuntimeError: it depends on the dtype, for which the page has no column.
    """
    found = {}
    for name in names:
        for kind in kinds:
            outcomes = {_tried(OPERATIONS[name], kind, dtype) for dtype in dtypes}
            if len(outcomes) > 1:
                raise RuntimeError(f"{name} on {kind} depends on the dtype: {outcomes}")
            found[name, kind] = outcomes.pop()
    return found


def _tried(run: Operation, kind: str, dtype: torch.dtype) -> Outcome:
    try:
        row = run(kind, dtype)
    except REFUSALS as error:
        return Outcome("no", str(error).splitlines()[0])
    return Outcome("PEFT", row.reason) if row.tier == "peft" else Outcome("yes", "")


def tiers(kind: str) -> tuple[str, str, str]:
    """The tier on a CPU, and in training and inference on a GPU that Triton serves."""
    gpu = replace(_tuning.tiles(CPU), obstacle=None, min_training=2**15, min_inference=0)
    cpu = _by_dtype(kind, training=True)
    with _tuning.override(CPU, gpu):
        return cpu, _by_dtype(kind, training=True), _by_dtype(kind, training=False)


def _by_dtype(kind: str, training: bool) -> str:
    found: dict[str, list[str]] = {}
    for dtype in KINDS[kind].dtypes:
        trial = Trial(kind, dtype)
        trial.model.train(training)
        found.setdefault(trial.row().tier, []).append(_short(dtype))
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(dtypes)}: {tier}" for tier, dtypes in found.items())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


# The page.

HEAD = """# What works on which layer

Written by `python scripts/support_table.py`, which tries every cell on a tiny layer.

## Operations

DoRA unless a row says otherwise, in fp32 and in bf16 with the same outcome. **yes**: hirank
computes it, and the result was checked. **PEFT**: PEFT's own code runs, and `hirank.explain` says
why. **no**: refused, by hirank, PEFT or the library that made the layer, with the sentence below.
"""
REASONS = """
## Why PEFT, why not

| operation | layers | outcome | what `explain` or the error says |
| --- | --- | --- | --- |
"""
WAYS = """
## Tiers

What `hirank.explain` calls the way of one active adapter, by dtype (of a quantised layer: the dtype
it computes in). On a GPU: with Triton kernels, and enough elements for them to pay.

| layer | dtypes | CPU | GPU, training | GPU, inference |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page; needs every library."""
    found = tried(list(KINDS))
    return f"{HEAD}\n{_matrix(found)}{REASONS}{''.join(reasons(found))}{WAYS}{_ways()}"


def _matrix(found: Outcomes) -> str:
    lines = [["", *KINDS], ["---"] * (len(KINDS) + 1)]
    lines += [[name, *(found[name, kind].word for kind in KINDS)] for name in OPERATIONS]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def reasons(found: Outcomes) -> Iterator[str]:
    """A line for each operation and text, with the layers that give it."""
    grouped: dict[tuple[str, Outcome], list[str]] = {}
    for (name, kind), outcome in found.items():
        if outcome.word != "yes":
            grouped.setdefault((name, outcome), []).append(kind)
    for (name, outcome), kinds in grouped.items():
        text = outcome.text.replace("|", "\\|")
        yield f"| {name} | {', '.join(kinds)} | {outcome.word} | {text} |\n"


def _ways() -> str:
    lines = []
    for kind, made in KINDS.items():
        dtypes = ", ".join(map(_short, made.dtypes))
        lines.append(f"| {kind} | {dtypes} | {' | '.join(tiers(kind))} |\n")
    return "".join(lines)


def cells(text: str) -> dict[tuple[str, str], str]:
    """The words of the first table of a page, by operation and layer."""
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] in OPERATIONS and len(row) == len(KINDS) + 1]
    return {(row[0], kind): word for row in rows for kind, word in zip(KINDS, row[1:], strict=True)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    given = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT and the libraries advise
        if given.check:
            return _check(old)
        missing = [f"{kind} needs {KINDS[kind].library}" for kind in KINDS if not available(kind)]
        if missing:
            print(f"{PAGE} stays as it is:", ", ".join(missing))
            return 0
        PAGE.write_text(page(), encoding="utf-8")
    return 0


def differences(text: str, names: Iterable[str] = OPERATIONS) -> list[str]:
    """Where a page differs from what the libraries that are here do, in fp32."""
    found = tried([kind for kind in KINDS if available(kind)], names, TRIED[:1])
    said = cells(text)
    return [
        f"{name} on {kind}: {outcome.word}, not {said.get((name, kind), 'there')}"
        for (name, kind), outcome in found.items()
        if said.get((name, kind)) != outcome.word
    ]


def _check(text: str) -> int:
    wrong = differences(text)
    if wrong:
        print(f"{PAGE} is not current, run python scripts/support_table.py:", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
