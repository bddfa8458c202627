"""The optimiser as torch knows it: groups, steps, state on disk. The arithmetic is in `rules.py`.

A step whose gradient of a parameter is not finite skips that parameter: weights, moments, basis and
step count stay, the group's `skipped` goes up, and the log names the parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from hirank.errors import HirankError
from hirank.optim import costs, rules, sharded, small
from hirank.optim.groups import groups_of, refuse, refuse_sparse, report_rank
from hirank.optim.hyper import Hyper, fixed, hyper_of, read_options
from hirank.optim.rules import Seen
from hirank.optim.sharded import Norm
from hirank.optim.state import stored_bytes

if TYPE_CHECKING:
    from hirank.optim.backward import StepInBackward

__all__ = ["LowRankAdamW", "Stepped"]

log = logging.getLogger("hirank.optim")

_BESIDES = {"params", "param_names", "name", "initial_lr", "skipped"}
"""Keys of a group that are no settings of ours."""


class Stepped(NamedTuple):
    """A step whose outcome the host does not know yet, and what the counters were before it."""

    p: Tensor
    ok: Tensor
    before: dict[str, int]


class LowRankAdamW(torch.optim.Optimizer):
    """AdamW that keeps its state in a low-rank subspace; every choice is a field of `Hyper`.

    Args:
        params: a model (embeddings, head, norms and biases then get plain AdamW), parameters, or
            groups; only groups that name a `rank` are projected.
        options: fields of `Hyper`, or the names other libraries have for them.

    Raises:
        HirankError: an unknown option, a value out of range, parameters flattened by ZeRO or FSDP1.
    """

    settings: ClassVar[Hyper] = Hyper()
    """Defaults of the class."""

    def __init__(self, params: nn.Module | Iterable[Any], **options: Any) -> None:
        named = read_options(options, self.settings)
        hyper = replace(self.settings, **named)
        self._index: dict[Tensor, int] = {}
        self._group: dict[Tensor, dict[str, Any]] = {}
        self._pending: list[Stepped] = []
        self._engine: StepInBackward | None = None
        self._moved = False
        self._built: dict[Tensor, Hyper] = {}  # the settings that a state was last held against
        super().__init__(groups_of(params, hyper), {**asdict(hyper), "skipped": 0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, with aliases, and with what cannot be trained refused."""
        own = {key: value for key, value in param_group.items() if key in _BESIDES}
        rest = {key: value for key, value in param_group.items() if key not in _BESIDES}
        named = read_options(rest, hyper_of(self.defaults))
        super().add_param_group({**own, **named})
        added = self.param_groups[-1]
        for p in added["params"]:
            refuse(p)
            self._index[p], self._group[p] = len(self._index), added
        report_rank(added["params"], added["rank"])
        if self._engine is not None:
            self._engine.watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickled, copied, or loaded: the groups are other objects than before."""
        super().__setstate__(state)
        self._group = {p: group for group in self.param_groups for p in group["params"]}
        self._index = {p: i for i, p in enumerate(self._group)}
        self._pending = []
        self._moved = getattr(self, "_moved", False)
        self._built = {}
        self._engine = getattr(self, "_engine", None)  # a copy has none, a loaded one keeps its own

    # Steps.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; while stepping in backward, end the window."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._engine is not None:
            self._engine.close()
        with torch._C.DisableTorchFunctionSubclass():  # an Int8Weight is asked a dozen things
            self._step_all()
        self._notice_idleness()
        self.settle()
        return loss

    def _step_all(self) -> None:
        together = []
        for group in self.param_groups:
            hyper = hyper_of(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                refuse_sparse(p.grad)
                if small.is_small(p, hyper):
                    together.append((p, p.grad))
                else:
                    self.step_parameter(p, p.grad, hyper)
        self.step_small(together)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)

    def _notice_idleness(self) -> None:
        """Say once that nothing was stepped: as a rule the model has other parameters by now."""
        if self._pending or self._moved:
            self._moved = True
        elif self._engine is None or not self._engine.calls:
            self._moved = True
            log.warning(
                "no parameter of the optimiser has a gradient; build it after the model is sharded "
                "(fully_shard), moved or converted, as that gives a model other parameters"
            )

    def step_parameter(
        self, p: Tensor, grad: Tensor | None, hyper: Hyper, *, seen: Seen | None = None
    ) -> Norm:
        """Step one parameter, from R if that is known (then without `grad`, unless the step needs
        it); `settle` comes later. The norm of what it was stepped with."""
        state = self.state_of(p, hyper)
        before = _counters(state)
        if seen is not None:
            outcome = rules.apply_reduced(p, seen, grad, state, hyper)
        else:
            assert grad is not None, "without R a step needs the gradient"
            projected = rules.is_projected(p, hyper)
            step = rules.galore_adam_step if projected else rules.adamw_step
            outcome = step(p, grad, state, hyper)
        self._pending.append(Stepped(p, outcome.ok, before))
        return outcome.norm

    def step_small(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Norm]:
        """Step small plain parameters by their gradients, together where they can be; the norm of
        each such step. `settle` comes later."""
        members = [(p, grad, self.state_of(p), self.hyper_of(p)) for p, grad in pairs]
        norms = []
        for batch in small.batches(members):
            before = [_counters(state) for _, _, state, _ in batch]
            oks, norm = small.step_together(batch)
            norms.append(norm)
            for (p, *_), ok, counters in zip(batch, oks.unbind(), before, strict=True):
                self._pending.append(Stepped(p, ok, counters))
        return norms

    def state_of(self, p: Tensor, hyper: Hyper | None = None) -> dict[str, Any]:
        """A parameter's state, with its number in it. `hyper`: its settings, if they are known."""
        if p not in self._index:
            raise HirankError(
                f"A parameter of shape {tuple(p.shape)} took another's place after the optimiser "
                "was built, as DeepSpeed ZeRO and FSDP1 do; use FSDP2 (fully_shard) instead."
            )
        state: dict[str, Any] = self.state[p]
        state.setdefault("index", self._index[p])
        hyper = hyper or self.hyper_of(p)
        if self._built.get(p) is not hyper:
            self._check_fixed(p, state, hyper)
        return state

    def _check_fixed(self, p: Tensor, state: dict[str, Any], hyper: Hyper) -> None:
        now, then = fixed(hyper), fixed(self._built.get(p, hyper))
        if now == then or "age" not in state:  # or nothing was built for the old ones
            self._built[p] = hyper
            return
        name, was, value = next(
            (n, a, b) for (n, a), (_, b) in zip(then, now, strict=True) if a != b
        )
        raise HirankError(
            f"{name} of {self._name(p)} was {was!r} when its state was made and is {value!r} now; "
            "change it before the first step, or build a new optimiser."
        )

    def hyper_of(self, p: Tensor) -> Hyper:
        """The settings of a parameter's group, as they are now."""
        return hyper_of(self._group[p])

    def settle(self) -> None:
        """Ask the device once which steps were skipped; put their counters back and say so."""
        pending, self._pending = self._pending, []
        devices: dict[torch.device, list[Stepped]] = {}
        for stepped in pending:
            devices.setdefault(stepped.ok.device, []).append(stepped)
        for here in devices.values():
            for stepped, ok in zip(here, torch.stack([s.ok for s in here]).tolist(), strict=True):
                if not ok:
                    self._undo(stepped)

    def _undo(self, stepped: Stepped) -> None:
        state = self.state[stepped.p]
        counters = {"step": 0, "age": 0} if "age" in state else {}
        state.update(counters | stepped.before)
        self._group[stepped.p]["skipped"] += 1
        name = self._name(stepped.p)
        log.warning(f"non-finite gradient of {name}: its step {state.get('step', 0)} is skipped")

    def _name(self, p: Tensor) -> str:
        index, group = self._index[p], self._group[p]
        names = group.get("param_names")
        if names is None:
            return f"parameter {index} {tuple(p.shape)}"
        return str(next(n for n, q in zip(names, group["params"], strict=True) if q is p))

    def step_in_backward(self, **options: Any) -> StepInBackward:
        """Step each parameter as soon as its gradient is there; options of `StepInBackward`."""
        from hirank.optim.backward import StepInBackward

        return StepInBackward(self, **options)

    def project_reduction(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Let DDP send projected gradients, see `ddp.py`; before the first step, once per model."""
        from hirank.optim.ddp import projected_all_reduce

        # DDP checks a hook's annotations, and takes none that are strings.
        model.register_comm_hook(self, lambda state, bucket: projected_all_reduce(state, bucket))

    # State.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps its own dtypes instead of taking the parameters'.

        Raises:
            HirankError: it is another optimiser's.
        """
        lacking = {
            key for g in state_dict["param_groups"] for key in asdict(Hyper()) if key not in g
        }
        if lacking:
            raise HirankError(
                f"The state has groups without {', '.join(sorted(lacking)[:3])}, so another "
                "optimiser wrote it; load weights only, and start with new state."
            )
        super().load_state_dict(state_dict)
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            if number in state_dict["state"]:
                self.state[p] = _copied(state_dict["state"][number], p.device)

    def state_bytes(self) -> int:
        """Bytes of the state that exists now."""
        return sum(stored_bytes(state) for state in self.state.values())

    def cost(self) -> int:
        """Bytes of the state after every parameter has stepped, from shapes alone."""
        total = 0
        for group in self.param_groups:
            hyper = hyper_of(group)
            for p in group["params"]:
                shape = p.shape if rules.is_projected(p, hyper) else sharded.local(p).shape
                total += costs.cost(tuple(shape), hyper, 8 if p.dtype == torch.float64 else 4)
        return total

    def adamw_8bit_cost(self) -> int:
        """Bytes of state that 8-bit AdamW would take for the same parameters: what to be below."""
        every = (sharded.local(p).numel() for group in self.param_groups for p in group["params"])
        return sum(costs.moments_cost(n, Hyper(state="int8")) for n in every)

    def gradient_cost(self, *, in_backward: bool = False) -> int:
        """Bytes of the gradients that exist at once, with one micro-batch a step.

        All of them, as projecting does not make them smaller; stepping in backward the largest one
        and those of small plain parameters, which wait for each other.
        """
        every = [(p, hyper_of(group)) for group in self.param_groups for p in group["params"]]
        if not in_backward:
            return sum(_gradient_bytes(p) for p, _ in every)
        waiting = sum(_gradient_bytes(p) for p, hyper in every if small.is_small(p, hyper))
        alone = (_gradient_bytes(p) for p, hyper in every if not small.is_small(p, hyper))
        return waiting + max(alone, default=0)

    def projected(self) -> list[Tensor]:
        """The parameters whose gradients are projected."""
        groups = ((hyper_of(group), group["params"]) for group in self.param_groups)
        return [p for hyper, params in groups for p in params if rules.is_projected(p, hyper)]

    def describe(self) -> str:
        """One line for a log: the class, how many parameters are projected, how, and the bytes; and
        that 8-bit AdamW would not need more, if that is so."""
        count, total = len(self.projected()), len(self._index)
        hyper = next((hyper_of(g) for g in self.param_groups if g["rank"] is not None), None)
        how = f" at rank {hyper.rank}, scale {hyper.scale:g}, gap {hyper.gap}" if hyper else ""
        return (
            f"{type(self).__name__}: {count} projected parameters{how}; "
            f"{total - count} with plain AdamW; {self.cost():,} bytes of state{self._no_gain()}"
        )

    def _no_gain(self) -> str:
        rival = self.adamw_8bit_cost()
        if self.cost() < rival:
            return ""
        return f", not below the {rival:,} of 8-bit AdamW; a smaller rank or int8 moments take less"


def _gradient_bytes(p: Tensor) -> int:
    return sharded.local(p).numel() * p.element_size() if p.requires_grad else 0


def _counters(state: Mapping[str, Any]) -> dict[str, int]:
    return {key: state[key] for key in ("step", "age") if key in state}


def _copied(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        key: value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }
