"""Stepping while backward runs, so that the gradients of a model never all exist at once.

A post-accumulate hook takes each gradient as soon as it is complete. A window is the backward
passes of one step, `micro_batches` of them; the last one of a window steps a parameter at once
(small plain ones, norms and biases, together when the window is closed), and `optimizer.step()`
(or the end of `window()`) closes the window. A gradient that comes after its parameter's step and
before the window is closed is an error.

    engine = optimizer.step_in_backward(micro_batches=4)
    for batch in four:
        (loss(batch) / 4).backward()      # the fourth one steps
    optimizer.step()                      # closes the window; then the scheduler

What waits between the passes of a window, as part of the optimiser's state, so that a checkpoint in
the middle of a window resumes bit by bit:

    projected    R, fp32, [r, n]: projection is linear, so the sum is exact
    in full      a plain parameter; one that is due for a refresh, whose basis comes from the sum
                 (`refresh_from="first"` takes the first pass's gradient instead); and always with
                 Fira's residual or APOLLO's scaling, which use the gradient itself

Clipping. A global norm needs every gradient before the first step, so with `clip` steps wait for
the end of the window, on R. The norm is that of what is stepped with: of R for a projected
parameter, of the gradient where it waits in full. It is at most the norm of the gradients, and the
same where nothing is projected or the basis is complete.

FSDP2 calls the hooks with its sharded, reduced gradients, and nothing more needs to be said.

Several processes without it. Give `process_group`: the mean over processes is taken of R (of the
gradient, if it waits in full) once per window, in the hook. Do not wrap the model in DDP then.
Parameters must get their gradients in the same order in every process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hirank.errors import HirankError
from hirank.optim import bases, rules, sharded, small
from hirank.optim.groups import refuse_sparse
from hirank.optim.hyper import Hyper
from hirank.optim.optimizer import LowRankAdamW
from hirank.optim.rules import Seen
from hirank.optim.sharded import Norm

__all__ = ["StepInBackward"]

_REDUCED, _DENSE, _COUNT = "waiting_reduced", "waiting", "waiting_count"


class StepInBackward:
    """Takes over the steps of an optimiser; see the module's text.

    Args:
        optimizer: any `LowRankAdamW`.
        micro_batches: backward passes of one step.
        clip: largest global norm, None for no limit.
        process_group: processes whose mean gradient is used, None for one process.

    Attributes:
        loss_scale: what the loss was multiplied by (fp16); gradients are divided by it.
        calls: how many steps have been taken; small plain parameters share one.
        grad_norm: global norm of what the last closed window was stepped with, before clipping: of
            R where a parameter is projected. None before the first one.
    """

    def __init__(
        self,
        optimizer: LowRankAdamW,
        *,
        micro_batches: int = 1,
        clip: float | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if micro_batches < 1:
            raise HirankError(f"micro_batches is {micro_batches}; give at least 1.")
        if clip is not None and not clip > 0:
            raise HirankError(f"clip is {clip}; give a norm above 0, or None for no limit.")
        if optimizer._engine is not None:
            raise HirankError(
                "The optimiser steps in backward already; remove() the other engine first."
            )
        if process_group is not None and any(map(sharded.is_sharded, optimizer._index)):
            raise HirankError(
                "process_group was given, but FSDP2 has taken the mean of these gradients already; "
                "leave process_group out."
            )
        self.optimizer, self.micro_batches, self.clip = optimizer, micro_batches, clip
        self.process_group = process_group
        self.loss_scale: float | Tensor = 1.0
        self.calls = 0
        self.grad_norm: Tensor | None = None
        self._norms: list[Norm] = []
        self._done: set[Tensor] = set()
        self._handles: dict[Tensor, Any] = {}
        self.watch()
        optimizer._engine = self

    def watch(self) -> None:
        """Take the gradients of parameters that are new in the optimiser, or no longer frozen."""
        for p in self._params:
            if p.requires_grad and p not in self._handles:
                self._handles[p] = p.register_post_accumulate_grad_hook(_weak_hook(self))

    @property
    def _params(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def remove(self) -> None:
        """Close the window and give the steps back to the optimiser."""
        self.close()
        for handle in self._handles.values():
            handle.remove()
        self._handles, self.optimizer._engine = {}, None

    @contextmanager
    def window(self, n: int) -> Iterator[None]:
        """A window of `n` backward passes, closed at its end; an error drops its gradients."""
        usual, self.micro_batches = self.micro_batches, n
        try:
            yield
        except BaseException:
            self._drop()
            raise
        finally:
            self.micro_batches = usual
        with torch.no_grad():
            self.close()

    def _drop(self) -> None:
        for p in self._params:
            for key in (_REDUCED, _DENSE, _COUNT):
                self.optimizer.state[p].pop(key, None)
        self._norms.clear()
        self._done.clear()
        self.optimizer.settle()

    # A gradient comes.

    def _hook(self, p: Tensor) -> None:
        hyper = self.optimizer.hyper_of(p)
        state = self.optimizer.state_of(p, hyper)
        if p in self._done:
            p.grad = None
            raise HirankError(
                f"A parameter of shape {tuple(p.shape)} got a further gradient after its step; "
                f"call optimizer.step() after every {self.micro_batches} backward passes, or give "
                "micro_batches the number of passes in a step."
            )
        if self._steps_at_once and _COUNT not in state and not small.is_small(p, hyper):
            self._done.add(p)
            self._norms.append(self._step_at_once(p, state, hyper))
            self.calls += 1
            return
        self._add(p, self._taken_from(p), state, hyper)
        if state[_COUNT] == self.micro_batches:
            self._complete(p, state, hyper)

    @property
    def _steps_at_once(self) -> bool:
        """Whether the first gradient of a window is the last, and nothing else is waited for."""
        return self.micro_batches == 1 and self.clip is None and self.process_group is None

    def _step_at_once(self, p: Tensor, state: dict[str, Any], hyper: Hyper) -> Norm:
        """Nothing waits, and where R is enough the gradient is gone before anything is made of R:
        no name here or in the callers may hold it."""
        grad: Tensor | None = self._taken_from(p)
        seen = None
        if rules.is_projected(p, hyper) and not rules.needs_dense(hyper):
            assert grad is not None
            seen = rules.reduce_gradient(p, grad, state, hyper)
            grad = None if seen is not None else grad
        return self.optimizer.step_parameter(p, grad, hyper, seen=seen)

    def _taken_from(self, p: Tensor) -> Tensor:
        grad, p.grad = p.grad, None
        assert grad is not None
        refuse_sparse(grad)
        return self._unscaled(grad)

    def _unscaled(self, grad: Tensor) -> Tensor:
        scaled = isinstance(self.loss_scale, Tensor) or self.loss_scale != 1.0
        if scaled:
            sharded.local(grad).div_(self.loss_scale)
        return grad

    def _add(self, p: Tensor, grad: Tensor, state: dict[str, Any], hyper: Hyper) -> None:
        """To what waits: projected where that is enough, else in full."""
        state[_COUNT] = state.get(_COUNT, 0) + 1
        key, value = _DENSE, grad
        if self._may_project(p, state, hyper):
            seen = rules.reduce_gradient(p, grad, state, hyper)
            if seen is not None:  # else not finite: kept in full, to be found so at the step
                key, value = _REDUCED, seen.reduced
        if key in state:
            state[key] += value
        else:
            state[key] = value

    def _may_project(self, p: Tensor, state: dict[str, Any], hyper: Hyper) -> bool:
        if _DENSE in state or not rules.is_projected(p, hyper) or rules.needs_dense(hyper):
            return False
        if _REDUCED in state or not bases.due(state):
            return True
        # A basis is due. Processes must see the same gradient when they compute it.
        return hyper.refresh_from == "first" and self.process_group is None

    def _complete(self, p: Tensor, state: dict[str, Any], hyper: Hyper) -> None:
        """The window's last gradient of p is there: step, or wait for clipping or the others."""
        for key in (_REDUCED, _DENSE):
            if key in state and self.process_group is not None:
                _average(state[key], self.process_group)
        self._done.add(p)
        if _DENSE in state and rules.is_projected(p, hyper) and not rules.needs_dense(hyper):
            seen = rules.reduce_gradient(p, state[_DENSE], state, hyper)
            if seen is not None:
                state[_REDUCED] = seen.reduced
                del state[_DENSE]
        if self.clip is None and not small.is_small(p, hyper):
            self._step(p, state, hyper)

    def _step(
        self, p: Tensor, state: dict[str, Any], hyper: Hyper, factor: Tensor | None = None
    ) -> None:
        reduced, dense = self._taken(state, factor)
        seen = None if reduced is None else Seen(reduced)
        norm = self.optimizer.step_parameter(p, dense, hyper, seen=seen)
        self._stepped([norm])

    def _stepped(self, norms: list[Norm]) -> None:
        self.calls += len(norms)
        if self.clip is None:  # else norms were taken before they were clipped
            self._norms += norms

    def _taken(
        self, state: dict[str, Any], factor: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What waited, projected or in full, times `factor`; it does not wait any more."""
        state.pop(_COUNT)
        parts = state.pop(_REDUCED, None), state.pop(_DENSE, None)
        for part in parts:
            if part is not None and factor is not None:
                sharded.local(part).mul_(factor.to(part.device))
        return parts

    # The window ends.

    @torch.no_grad()
    def close(self) -> None:
        """Step what still waits, and count what was skipped. `optimizer.step()` calls this."""
        with torch._C.DisableTorchFunctionSubclass():
            self._close()

    def _close(self) -> None:
        for p in self._waiting():
            if p not in self._done:  # fewer passes than expected: an expert, an epoch's last window
                self._complete(p, self.optimizer.state[p], self.optimizer.hyper_of(p))
        waiting = self._waiting()
        if waiting:
            self._step_waiting(waiting, self._factor(waiting))
        if self._norms:
            self.grad_norm, self._norms = _total(self._norms), []
        self._done.clear()
        self.optimizer.settle()
        self.watch()

    def _waiting(self) -> list[Tensor]:
        return [p for p in self._params if _COUNT in self.optimizer.state[p]]

    def _step_waiting(self, waiting: list[Tensor], factor: Tensor | None) -> None:
        together = []
        for p in waiting:
            state, hyper = self.optimizer.state[p], self.optimizer.hyper_of(p)
            if small.is_small(p, hyper):
                _, dense = self._taken(state, factor)
                assert dense is not None
                together.append((p, dense))
            else:
                self._step(p, state, hyper, factor)
        self._stepped(self.optimizer.step_small(together))

    def _factor(self, waiting: list[Tensor]) -> Tensor | None:
        """What clipping multiplies gradients by."""
        if self.clip is None:
            return None
        states = [self.optimizer.state[p] for p in waiting]
        held: list[Tensor] = [state.get(_REDUCED, state.get(_DENSE)) for state in states]
        self._norms = [sharded.norm(part) for part in held]
        factor: Tensor = (self.clip / (_total(self._norms) + 1e-6)).clamp(max=1.0)
        return factor

    def waiting_bytes(self) -> int:
        """Bytes of the gradients that wait now, projected or in full."""
        parts = (
            state[key]
            for state in self.optimizer.state.values()
            for key in (_REDUCED, _DENSE)
            if key in state
        )
        return sum(part.numel() * part.element_size() for part in parts)


def _weak_hook(engine: StepInBackward) -> Callable[[Any], None]:
    """A hook that does not keep its engine: a parameter holds its hooks where Python's collector
    does not look, and the engine holds the parameters, so none of them would ever be let go."""
    held = weakref.ref(engine)

    def hook(p: Tensor) -> None:
        engine = held()
        if engine is not None:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                engine._hook(p)

    return hook


def _total(norms: list[Norm]) -> Tensor:
    """The norm of all parts, with one sum over processes for those that are sharded alike."""
    alike: dict[Any, list[Tensor]] = {}
    for norm in norms:
        alike.setdefault(norm.spread, []).append(norm.value)
    device = norms[0].value.device
    each = [_norm_of_norms(*group).to(device) for group in alike.items()]
    whole: Tensor = torch.stack(each).norm()
    return whole


def _norm_of_norms(spread: Any, norms: list[Tensor]) -> Tensor:
    whole: Tensor = torch.stack([norm.to(norms[0].device) for norm in norms]).norm()
    return whole if spread is None else sharded.total_over(whole.square(), spread).sqrt()


def _average(part: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(part, group=group)
    part.div_(dist.get_world_size(group))
