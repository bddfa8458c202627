"""Is one GEMM with the low-rank product, gain and bias in it faster than cuBLAS and a pass?

    python benchmarks/trials/fused_gemm.py --out benchmarks/results --commit SHA

Forward    layer   u = x W^T + b in cuBLAS, u += h B^T in cuBLAS, u <- g u + (1 - g) b in one pass
           fused   y = g (x W^T + h B^T) + b in one kernel
Backward   layer   dx = t W, dx += tB A in cuBLAS
           fused   dx = t W + tB A in one kernel
h = s x A^T and tB = t (s B) are there beforehand in both. `base` is the large product alone, and
`joined` cuBLAS on operands that lie side by side in memory, [x, h] and [W, B]: yardsticks only.

First every candidate runs on a small problem in a process of its own kind, so that a compiler that
crashes or a kernel that hangs ends that process only; all that happened is recorded. Then, for each
setting, the candidates that work are compared with fp64, tuned in a few calls, and the best of each
kind is timed against cuBLAS: arms take turns, each in a CUDA graph over several sets of inputs, so
times are the GPU's and no weight waits in the L2 cache. `host_s` is what a call costs the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gemm_plans import KINDS, Plan, candidates, fused, launch, multiprocessors
from gemm_problem import Problem, Trial, base, joined, layer, make, reference, small
from torch import Tensor

from hirank.bench import record
from hirank.bench.session import Result
from hirank.bench.timing import Sample, interleaved, quantiles, ratios
from hirank.testing import relative_rms

SHAPES = ((4096, 12288), (12288, 4096), (4096, 4096), (4096, 1024))  # in, out
RANKS = (384, 16, 64)
DIRECTIONS = ("forward", "backward")
SETS = 3  # of inputs; the smallest has 40 MB of operands and outputs
BUDGET = 2.0  # times the error of the cuBLAS path
PROBE_SECONDS = 45.0


# Which candidates work: each kind in a process of its own.


def probe(kind: str, direction: str, answers: Path) -> None:
    """Run each candidate of `kind` on a small problem; a line of `answers` for each."""
    problem = make(small(direction), 0)
    truth = reference(problem)
    allowed = BUDGET * relative_rms(layer(problem), truth)
    for plan in candidates(kind):
        began = time.perf_counter()
        try:
            found = _probed(plan, problem, truth, allowed)
        except Exception as error:  # this is where it is found out what fails, and how
            found = {"status": f"failed: {type(error).__name__}: {str(error).strip()[-300:]}"}
        found |= {"plan": str(plan), "seconds": time.perf_counter() - began}
        with answers.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def _probed(plan: Plan, problem: Problem, truth: Tensor, allowed: float) -> dict[str, Any]:
    m, n, _, _ = problem.sizes
    out = torch.full((m, n), torch.nan, dtype=problem.a1.dtype, device=problem.a1.device)
    kernel = launch(plan, problem, out, multiprocessors())
    error = relative_rms(out, truth)  # NaN where the kernel wrote nothing
    found = {
        "error": error if error == error else None, "registers": kernel.n_regs,
        "spills": kernel.n_spills, "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
    }  # fmt: skip
    if not error <= allowed:
        return {"status": f"wrong: relative RMS error {error:.2e}, allowed {allowed:.2e}"} | found
    if plan.kind == "triton-ws" and kernel.metadata.num_warps == plan.warps:
        return {"status": "compiled, but not specialised: the same kernel as tma"} | found
    return {"status": "works"} | found


def probe_all(folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What became of every candidate, by direction and kind; all processes at once."""
    children = {}
    for key in ((direction, kind) for direction in DIRECTIONS for kind in KINDS):
        path = folder / "-".join(key)
        command = [sys.executable, __file__, "--probe", *key, "--answers", f"{path}.jsonl"]
        with Path(f"{path}.txt").open("w", encoding="utf-8") as log:
            children[key] = subprocess.Popen(command, stdout=log, stderr=log), path
    end = time.monotonic() + PROBE_SECONDS
    return {key: _answers(key[1], child, path, end) for key, (child, path) in children.items()}


def _answers(
    kind: str, child: subprocess.Popen[bytes], path: Path, end: float
) -> list[dict[str, Any]]:
    try:
        code = child.wait(max(0.0, end - time.monotonic()))
        ended = f"failed: the process ended with code {code}"
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        ended = f"failed: no answer within {PROBE_SECONDS:.0f} s"
    file = Path(f"{path}.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    answers = [json.loads(line) for line in lines]
    log = Path(f"{path}.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    said = next((line for line in log if "Assertion" in line or "rror:" in line), "")[-300:]
    for answer in answers:
        if "PassManager" in answer["status"]:
            answer["status"] += f" ({said})"
    missing = candidates(kind)[len(answers) :]
    states = [f"{ended} ({said})", *["failed: not reached"] * len(missing)]
    return answers + [
        {"plan": str(plan), "status": state} for plan, state in zip(missing, states, strict=False)
    ]


# Timing.


def graphed(calls: Sequence[Callable[[], Tensor]], rounds: int = 3) -> Callable[[], Sample]:
    """A sample of GPU seconds a call: `calls` in one CUDA graph, replayed `rounds` times."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def sample() -> Sample:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
        end.synchronize()
        return {"call_s": start.elapsed_time(end) / 1e3 / (rounds * len(calls))}

    return sample


def host_seconds(calls: Sequence[Callable[[], Tensor]], rounds: int = 7) -> float:
    """What a call costs the host: the median over rounds that begin with an idle GPU."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - began) / len(calls))
    torch.cuda.synchronize()
    return statistics.median(times)


def measure(trial: Trial, plans: dict[str, list[Plan]], repeats: int) -> list[Result]:
    """All arms of one setting."""
    problems = [make(trial, seed) for seed in range(SETS)]
    truth = reference(problems[0])
    errors = {"layer": relative_rms(layer(problems[0]), truth)}
    tuned = {kind: tune(some, problems[0], truth, errors["layer"]) for kind, some in plans.items()}
    del truth
    arms: dict[str, list[Callable[[], Tensor]]] = {
        "base": [lambda p=p: base(p) for p in problems],
        "layer": [lambda p=p: layer(p) for p in problems],
        "joined": [joined(p) for p in problems],
    }
    more: dict[str, dict[str, Any]] = {name: {} for name in arms}
    for kind, found in tuned.items():
        more[kind] = {"plans": {str(plan): told for plan, told in found.items()}}
        fits = {plan: told["call_s"] for plan, told in found.items() if "call_s" in told}
        if fits:
            best = min(fits, key=fits.__getitem__)
            errors[kind] = found[best]["error"]
            more[kind]["plan"] = str(best)
            arms[kind] = [lambda p=p, b=best: fused(b, p, multiprocessors()) for p in problems]
    samples = interleaved(
        {name: graphed(calls) for name, calls in arms.items()}, repeats=repeats, warmup=2
    )
    compared = ratios(samples, "call_s")
    return [
        Result(name, _metrics(trial, name, samples, compared, errors, arms) | told)
        for name, told in more.items()
    ]


def _metrics(
    trial: Trial,
    name: str,
    samples: dict[str, list[Sample]],
    compared: dict[str, dict[str, float]],
    errors: dict[str, float],
    arms: dict[str, list[Callable[[], Tensor]]],
) -> dict[str, Any]:
    if name not in samples:
        return {}
    call_s = quantiles([sample["call_s"] for sample in samples[name]])
    flops = trial.flops + (0 if name == "base" else trial.low_rank_flops)
    found = {"call_s": call_s, "rate": flops / call_s["p50"], "ratio": compared[name]}
    found["host_s"] = host_seconds(arms[name])
    return found | ({"error": errors[name]} if name in errors else {})


def tune(
    plans: Sequence[Plan], problem: Problem, truth: Tensor, plain: float
) -> dict[Plan, dict[str, Any]]:
    """Error of each plan, and its time on one call at a time if the error is within the budget."""
    from triton.testing import do_bench

    found: dict[Plan, dict[str, Any]] = {}
    for plan in plans:
        try:
            error = relative_rms(fused(plan, problem, multiprocessors()), truth)
            if not error <= BUDGET * plain:
                found[plan] = {"status": f"wrong: {error:.2e}, cuBLAS {plain:.2e}"}
                continue
            call = lambda plan=plan: fused(plan, problem, multiprocessors())  # noqa: E731
            ms = do_bench(call, warmup=5, rep=20, return_mode="median")
            found[plan] = {"error": error, "call_s": ms / 1e3}
        except Exception as failure:  # reported, see above
            found[plan] = {"status": f"failed: {type(failure).__name__}: {str(failure)[-300:]}"}
    return found


# What is kept and shown.


def trials(tokens: int) -> Iterator[Trial]:
    """All settings, the telling ones first."""
    for rank in RANKS:
        for direction in DIRECTIONS:
            for n_in, n_out in SHAPES:
                yield Trial(direction, tokens, n_in, n_out, rank)


def row(trial: Trial, found: Sequence[Result]) -> list[str]:
    """A line of the table: microseconds, TFLOP/s in brackets, then the best arm over the layer."""
    by_arm = {one.arm: one.metrics for one in found}
    cells = [trial.direction, f"{trial.n_in}->{trial.n_out}", str(trial.rank)]
    for arm in ("base", "layer", "joined", *KINDS):
        told = by_arm.get(arm, {})
        timed = "call_s" in told
        cells.append(
            f"{told['call_s']['p50'] * 1e6:.0f} ({told['rate'] / 1e12:.0f})" if timed else "-"
        )
    timed_kinds = {k: by_arm[k] for k in KINDS if "call_s" in by_arm.get(k, {})}
    if not timed_kinds:
        return [*cells, "-", "-"]
    best = min(timed_kinds, key=lambda kind: timed_kinds[kind]["call_s"]["p50"])
    return [*cells, f"{timed_kinds[best]['ratio']['layer']:.3f}", timed_kinds[best]["plan"]]


def show(rows: list[list[str]]) -> None:
    """Print aligned columns."""
    head = ["direction", "in->out", "r", "base us (TFLOP/s)", "layer", "joined", *KINDS]
    table = [[*head, "best/layer", "best plan"], *rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def run(given: argparse.Namespace) -> None:
    """Probe, measure, record, show."""
    end = time.monotonic() + given.limit
    out = Path(given.out)
    facts = {
        "device": record.device_facts(torch.device("cuda", 0)),
        "versions": record.version_facts(), **record.source_facts(given.commit),
        "command": f"python benchmarks/trials/fused_gemm.py --commit {given.commit}",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        answers = probe_all(Path(scratch))
    working: dict[str, dict[str, list[Plan]]] = {direction: {} for direction in DIRECTIONS}
    for (direction, kind), told in answers.items():
        found = [Result(kind, answer) for answer in told]
        lines = record.records("fused_gemm_plans", small(direction), found, facts)
        record.append(out, "fused_gemm_plans", lines)
        works = {answer["plan"] for answer in told if answer["status"] == "works"}
        working[direction][kind] = [p for p in candidates(kind) if str(p) in works]
        for answer in told:
            print(f"{direction:8}  {answer['plan']:45}  {answer['status']}", flush=True)
    print(f"probed with {end - time.monotonic():.0f} s left", flush=True)
    rows = []
    for trial in trials(given.tokens):
        if time.monotonic() > end:
            print(f"no time left for {trial}")
            continue
        results = measure(trial, working[trial.direction], given.repeats)
        record.append(out, "fused_gemm", record.records("fused_gemm", trial, results, facts))
        rows.append(row(trial, results))
        torch.cuda.empty_cache()
    show(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="benchmarks/results", help="folder of the results")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--limit", type=float, default=85.0, help="seconds; then no new setting")
    parser.add_argument("--probe", nargs=2, metavar=("DIRECTION", "KIND"), help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("This trial is about Hopper GPUs: run it on an H100 or H200.", file=sys.stderr)
        return 2
    if given.probe:
        probe(given.probe[1], given.probe[0], given.answers)
    else:
        run(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
