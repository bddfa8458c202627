"""Suite `tune`: the fastest tiles of this GPU, and from which size its kernels pay.

Forward tiles, and the crossover for inference where both ways agreed in every bit, are kept in the
user's cache folder and used from then on. Backward tiles and the crossover for training are said
but not kept: they change the last bits of dm, so they belong into the table of `_tuning`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hirank.bench.session import Result, Session
from hirank.bench.settings import Tune
from hirank.bench.shapes import linears
from hirank.bench.timing import calls, quantiles
from hirank.errors import HirankError
from hirank.kernels import _tuning, _tuning_store
from hirank.kernels._triton import triton
from hirank.kernels._tuning import Elementwise, Tiles
from hirank.kernels._tuning_store import Block, Saved
from hirank.kernels.dora_compose import dora_compose
from hirank.kernels.dora_linear import dora_linear
from hirank.kernels.gain_pass import gain_backward, gain_forward_

__all__ = ["ARMS", "Point", "best", "blocks", "crossover", "run"]

ARMS = ("gain-forward", "gain-backward", "compose-forward", "compose-backward", "crossover")
_MOVED = {"gain-forward": 2, "gain-backward": 3, "compose-forward": 3, "compose-backward": 5}
_GAIN = 0.02  # by which a tile must be faster than the table's to replace it
_SLACK = 1.02  # by which kernels may seem slower and still count as even
_HEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # rows of 4096 in the search for a crossover
_WIDTH, _IN, _RANK = 4096, 64, 8  # small products: the passes and the launches are what counts

Way = Callable[[], object]
Clock = Callable[[Way], list[float]]
"""Seconds of several runs of a function."""
Times = Mapping[Block, Sequence[float]]
"""Median seconds of a block, one for each shape."""


class Point(NamedTuple):
    """Seconds of both ways at one size."""

    elements: int
    eager: float
    fused: float


# Choosing, without a GPU.


def blocks(name: str) -> list[Block]:
    """Candidates of a pass: 8 to 64 elements a thread, wide or narrow."""
    backward = name.endswith("backward")
    heights = (8, 16, 32, 64, 128) if backward else (1, 2, 4, 8, 16, 32)
    widths = (32, 64, 128, 256) if backward else (128, 256, 512, 1024, 2048)
    every = [Block(m, n, w) for m in heights for n in widths for w in (4, 8)]
    return [block for block in every if 8 <= block.block_m * block.block_n / _threads(block) <= 64]


def _threads(block: Block) -> int:
    return 32 * block.num_warps


def best(times: Times, table: Block) -> Block:
    """The block with the least geometric mean of times; the table's unless another is clearly so.

    Blocks that did not run on every shape are left out.
    """
    shapes = len(times[table])
    score = {
        block: statistics.fmean(map(math.log, found))
        for block, found in times.items()
        if len(found) == shapes
    }
    winner = min(score, key=lambda block: score[block])
    return winner if score[winner] < score[table] + math.log(1 - _GAIN) else table


def crossover(points: Iterable[Point]) -> int:
    """Elements from which the kernels are never slower; beyond the largest if they always are."""
    least = 0
    for point in sorted(points):
        if point.fused > _SLACK * point.eager:
            least = 2 * point.elements
    return least


# Measuring.


def run(settings: Tune, session: Session) -> list[Result]:
    """Tune the session's GPU, say what was found, and keep what can be kept."""
    device = session.device
    obstacle = None if device.type == "cuda" else "a CPU runs the plain formula, without tiles"
    obstacle = obstacle or _tuning.tiles(device).obstacle
    if obstacle:
        session.say(f"There is nothing to tune: {obstacle}.")
        return []
    properties = torch.cuda.get_device_properties(device)
    table, clock = _tuning.tabled(properties), _gpu_clock(10.0 * session.repeats)
    before = _tuning_store.load(properties.name, triton.__version__) or unmeasured(table)
    found, results = tuned(table, before, settings, session, clock)
    if settings.keep:
        session.say(f"kept in {_kept(properties.name, found)}")
        _tuning.forget(device)
    return results


def _kept(gpu: str, found: Saved) -> str:
    try:
        return str(_tuning_store.save(gpu, triton.__version__, found))
    except OSError as error:
        raise HirankError(
            f"What was tuned cannot be kept ({error.strerror}): make the cache folder writable, "
            "or name another with XDG_CACHE_HOME."
        ) from error


def _gpu_clock(milliseconds: float) -> Clock:
    """Times on the GPU alone, with its cache emptied between runs."""

    def clock(go: Way) -> list[float]:
        found = triton.testing.do_bench(go, warmup=10, rep=milliseconds, return_mode="all")
        return [one / 1e3 for one in found]

    return clock


def unmeasured(table: Tiles) -> Saved:
    """What is kept of a GPU on which nothing was tuned."""
    return Saved(_block("gain-forward", table), _block("compose-forward", table), None)


def tuned(
    table: Tiles, before: Saved, settings: Tune, session: Session, clock: Clock
) -> tuple[Saved, list[Result]]:
    """What is to be kept, and results for the table's and the best block of each pass and shape.

    What the session's arms leave out stays as it was `before`.
    """
    chosen: dict[str, Block] = {}
    results = []
    arms = session.chosen(ARMS)
    for name in arms:
        if name != "crossover":
            times, chosen[name] = _search(name, table, settings, session, clock)
            results += _results(name, times, _block(name, table), chosen[name], settings)
            session.tidy()
    least = _crossovers(table, session) if "crossover" in arms else Least()
    session.say(_row(chosen, least))
    kept: dict[str, Any] = {_attribute(n): chosen[n] for n in chosen if n.endswith("forward")}
    if "crossover" in arms:
        kept["min_inference"] = least.inference if least.equal else None
    return before._replace(**kept), results


def _attribute(name: str) -> str:
    return name.replace("-", "_")


def _tile(name: str, table: Tiles) -> Elementwise:
    found: Elementwise = getattr(table, _attribute(name))
    return found


def _block(name: str, table: Tiles) -> Block:
    tile = _tile(name, table)
    return Block(tile.block_m, tile.block_n, tile.num_warps)


def _with(name: str, block: Block, table: Tiles) -> Tiles:
    return _put(name, Elementwise(*block, _tile(name, table).programs), table)


def _put(name: str, tile: Elementwise, table: Tiles) -> Tiles:
    changes: dict[str, Any] = {_attribute(name): tile}
    return replace(table, **changes)


AllTimes = dict[Block, list[list[float]]]


def _search(
    name: str, table: Tiles, settings: Tune, session: Session, clock: Clock
) -> tuple[AllTimes, Block]:
    """Times of every candidate on every shape, and the best."""
    mine, shapes = _block(name, table), _shapes(settings)
    times: AllTimes = {block: [] for block in dict.fromkeys([mine, *blocks(name)])}
    session.say(f"{name}: {len(times)} tiles on {len(shapes)} shapes")
    for shape in shapes:
        go = _pass(name, *shape, session.device)
        for block, found in times.items():
            with _tuning.override(session.device, _with(name, block, table)):
                found += [clock(go)] if block == mine else _if_it_runs(go, clock)
    chosen = best({block: _medians(found) for block, found in times.items()}, mine)
    session.say(_verdict(name, times, mine, chosen))
    if name.endswith("backward"):
        session.say(_programs(name, _with(name, chosen, table), shapes, session, clock))
    elif not _same_bits(name, mine, chosen, table, shapes[0], session.device):
        session.say(f"{name}: but the results differ in a bit, so the table's stays")
        chosen = mine
    return times, chosen


def _medians(found: Iterable[Sequence[float]]) -> list[float]:
    return [statistics.median(one) for one in found]


def _if_it_runs(go: Way, clock: Clock) -> list[list[float]]:
    """One list of times, or none where a tile needs more than the GPU has."""
    try:
        return [clock(go)]
    except triton.OutOfResources:
        return []


def _programs(
    name: str, tiles: Tiles, shapes: Sequence[tuple[int, int]], session: Session, clock: Clock
) -> str:
    """How the time depends on the number of programs of a reduction."""
    tile, words = _tile(name, tiles), []
    for share in (0.25, 0.5, 1, 2, 4):
        other = replace(tile, programs=max(1, int(tile.programs * share)))
        with _tuning.override(session.device, _put(name, other, tiles)):
            goes = [_pass(name, *shape, session.device) for shape in shapes]
            seconds = sum(_medians(clock(go) for go in goes))
        words.append(f"{other.programs:,}: {seconds * 1e6:.1f}")
    return f"{name}: us by number of programs: {', '.join(words)}"


def _same_bits(
    name: str, a: Block, b: Block, table: Tiles, shape: tuple[int, int], device: torch.device
) -> bool:
    """Whether two tiles of a forward pass give the same result."""
    u, v = (torch.randn(shape, device=device, dtype=_dtype(device)) for _ in range(2))
    gain, norm = torch.randn(shape[1], device=device), torch.ones(shape[1], device=device)
    found = []
    for block in (a, b):
        with _tuning.override(device, _with(name, block, table)):
            out = u.clone()
            if name == "gain-forward":
                gain_forward_(out, gain, norm, v[0])
            else:
                out = dora_compose(u, v, gain, norm, scale=2.0)
        found.append(out)
    return torch.equal(*found)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _shapes(settings: Tune) -> list[tuple[int, int]]:
    """(tokens, out features), each once."""
    return [(settings.tokens, n) for n in dict.fromkeys(n for _, n in linears(settings.shape))]


def _pass(name: str, rows: int, columns: int, device: torch.device) -> Way:
    """One run of a pass over [rows, columns], and over nothing else that is large."""
    dtype = _dtype(device)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    u, v, dout = (normal(rows, columns) for _ in range(3))
    norm = torch.ones(columns, device=device)
    gain = torch.where(torch.arange(columns, device=device) % 2 == 0, norm, -norm)
    if name == "gain-forward":  # |g| = 1: in place again and again, and still the same size
        return lambda: gain_forward_(u, gain, norm, None)
    if name == "gain-backward":
        small = (normal(rows, 16), normal(rows, 16), normal(columns, 16), normal(columns, 16))
        return lambda: gain_backward(dout, u, gain, norm, None, *small, True)
    if name == "compose-forward":
        return lambda: dora_compose(u, v, gain, norm, scale=2.0)
    leaves = [one.requires_grad_() for one in (u, v, gain)]
    out = dora_compose(u, v, gain, norm, scale=2.0)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


# The crossover.


class Least(NamedTuple):
    """Elements from which the kernels pay; None: not measured."""

    training: int | None = None
    inference: int | None = None
    equal: bool = False
    """Whether both ways agreed in every bit in inference."""


def _crossovers(table: Tiles, session: Session) -> Least:
    points = {training: _points(training, table, session.device) for training in (True, False)}
    for training, found in points.items():
        session.say(_shown(found, training))
    equal = all(_equal(height, table, session.device) for height in _HEIGHTS)
    if not equal:
        session.say("The two ways differ in a bit, so the crossover for inference is not kept.")
    return Least(crossover(points[True]), crossover(points[False]), equal)


def _points(training: bool, table: Tiles, device: torch.device) -> list[Point]:
    return [
        _point(height * _WIDTH, *_both(height, training, device, table), device)
        for height in _HEIGHTS
    ]


def _equal(height: int, table: Tiles, device: torch.device) -> bool:
    eager, fused = (go() for go in _both(height, False, device, table))
    return torch.equal(cast(Tensor, eager), cast(Tensor, fused))


def _both(height: int, training: bool, device: torch.device, table: Tiles) -> tuple[Way, Way]:
    """A small layer with a bias by the plain formula, and the same by the kernels."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device) / 8

    dtype = _dtype(device)
    x, weight = normal(height, _IN).to(dtype), normal(_WIDTH, _IN).to(dtype)
    leaves = [normal(_RANK, _IN), normal(_WIDTH, _RANK), 1 + normal(_WIDTH)]
    leaves = [one.requires_grad_(training) for one in leaves]
    norm, bias = torch.ones(_WIDTH, device=device), normal(_WIDTH).to(dtype)
    dy = normal(height, _WIDTH).to(dtype)
    always = replace(table, min_training=0, min_inference=0)

    def way(backend: str) -> Way:
        def go() -> object:
            A, B, m = leaves
            with torch.set_grad_enabled(training), _tuning.override(device, always):
                y = dora_linear(
                    x, weight, A, B, scale=2.0, magnitude=m, norm=norm, bias=bias, backend=backend
                )
                return torch.autograd.grad(y, leaves, dy) if training else y

        return go

    return way("torch"), way("triton")


def _point(elements: int, eager: Way, fused: Way, device: torch.device) -> Point:
    """Medians of seven turns of each. The host's time counts here: small layers wait for it."""
    turns = [[calls(go, 20, device) for go in (eager, fused)] for _ in range(8)][1:]
    return Point(elements, *map(statistics.median, zip(*turns, strict=True)))


# Saying.


def _named(block: Block) -> str:
    return f"{block.block_m} x {block.block_n}, {block.num_warps} warps"


def _verdict(name: str, times: AllTimes, table: Block, block: Block) -> str:
    if block == table:
        return f"{name}: the table's {_named(table)} stays"
    pairs = zip(times[table], times[block], strict=True)
    ratio = statistics.geometric_mean(statistics.median(a) / statistics.median(b) for a, b in pairs)
    return f"{name}: {_named(block)} is {ratio:.2f} x as fast as the table's {_named(table)}"


def _shown(points: Sequence[Point], training: bool) -> str:
    lines = [f"{'training' if training else 'inference'}: elements, eager us, fused us"]
    lines += [f"{p.elements:>12,} {p.eager * 1e6:>8.1f} {p.fused * 1e6:>8.1f}" for p in points]
    return "\n".join(lines)


def _row(chosen: Mapping[str, Block], least: Least) -> str:
    """All that was found, as a row of the table in `_tuning` says it."""
    words = [f"{_attribute(name)}=Block{tuple(block)}" for name, block in chosen.items()]
    numbers = {"min_training": least.training, "min_inference": least.inference}
    words += [f"{name}={value}" for name, value in numbers.items() if value is not None]
    return f"as a row of the table: {', '.join(words)}"


def _results(
    name: str, times: AllTimes, table: Block, chosen: Block, settings: Tune
) -> list[Result]:
    """One result for each shape of the table's block and of the best."""
    found = []
    for block, which in {table: "table", chosen: "best"}.items():
        for (rows, columns), seconds in zip(_shapes(settings), times[block], strict=True):
            moved = 2 * _MOVED[name] * rows * columns  # two bytes an element
            metrics: dict[str, Any] = {
                "block": list(block),
                "call_s": quantiles(seconds),
                "bytes_per_s": quantiles([moved / one for one in seconds]),
            }
            found.append(Result(f"{name} {rows} x {columns}, {which}: {_named(block)}", metrics))
    return found
