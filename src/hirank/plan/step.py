"""One training step under the eyes of `Live`: what happens when, and what each tensor is.

    forward      up to the input of the output head; what is alive then is kept for backward
    loss         head and loss
    loss back    until the gradient of the head's input is there
    blocks back  the rest of the backward pass
    step         the optimiser; `refresh` if states and bases are made

Clipping is a phase of its own, and so are the plain parameters of a low-rank optimiser: each grows
with the model's depth, and a phase may do so in one place only (see `depth.py`).

The same code runs on fake tensors and on real ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hirank.optim.hyper import Hyper
from hirank.optim.rules import is_projected
from hirank.optim.weights import Int8Weight
from hirank.plan.live import Live
from hirank.plan.losses import loss_of
from hirank.plan.setting import Setting
from hirank.plan.sizes import in_blocks
from hirank.plan.states import nf4_bytes
from hirank.plan.subject import in_nf4, states_of

__all__ = ["KEPT", "LOGITS", "TEMPORARY", "Run"]

KEPT, LOGITS, TEMPORARY = "activations kept", "logits and loss", "method temporaries"
RECOMPUTED = "recomputation peak"


class Run:
    """A model, its optimiser and the count of what is alive while they work.

    Args:
        setting: what is trained, and how.
        model: in training mode, with its tensors.
        optimizer: makes the optimiser of a model.
    """

    def __init__(
        self,
        setting: Setting,
        model: Any,
        optimizer: Callable[[Setting, nn.Module], torch.optim.Optimizer],
    ) -> None:
        self.setting, self.model, self.live = setting, model, Live()
        with self.live:
            if setting.checkpointing:
                self._checkpoint()
            self.optimizer = optimizer(setting, model)
            with self.live.at_once():
                self._adopt()
            self.live.phase = "between"
        if setting.is_low_rank:
            self._tell_plain_ones_apart()
        self.trained = [p for p in model.parameters() if p.requires_grad]
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self._has_gradient)
        model.get_output_embeddings().register_forward_pre_hook(self._before_head)
        if setting.step_in_backward:
            self.optimizer.step_in_backward(micro_batches=self.passes)  # type: ignore[attr-defined]

    def _tell_plain_ones_apart(self) -> None:
        optimizer: Any = self.optimizer
        step = optimizer.step_parameter

        def told(p: Tensor, grad: Tensor | None, hyper: Hyper, **more: Any) -> Any:
            phase = self.live.phase
            if phase not in ("step", "refresh") or is_projected(p, hyper):
                return step(p, grad, hyper, **more)
            with self.live.during(f"{phase}: plain", TEMPORARY):
                return step(p, grad, hyper, **more)

        optimizer.step_parameter = told

    @property
    def passes(self) -> int:
        """In one step. Only a step in backward counts them: else gradients of earlier passes are
        made of zeros, and the last pass finds what it would have found."""
        return min(self.setting.accumulation, 2) if self.setting.step_in_backward else 1

    def _checkpoint(self) -> None:
        options = {"use_reentrant": False, "context_fn": self._recomputing}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the name is an old one in some versions
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if self.setting.is_adapter:
            self.model.enable_input_require_grads()

    def _recomputing(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._recomputation()

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        with self.live.during(self.live.phase, RECOMPUTED):
            yield

    def _adopt(self) -> None:
        packed = in_nf4(self.model) if self.setting.is_quantised else []
        for p in packed:
            codes = -(-p.numel() // 2)
            size = in_blocks(codes) + nf4_bytes(p.numel()) - codes
            self.live.adopt([p], "quantised weights", size)
        known = {id(p) for p in packed}
        for p in self.model.parameters():
            if id(p) not in known:
                self.live.adopt([p], self._class_of(p))
        self.live.adopt(self.model.buffers(), "weights")

    def _class_of(self, p: Tensor) -> str:
        if isinstance(p, Int8Weight):
            return "quantised weights"
        return "adapters" if self.setting.is_adapter and p.requires_grad else "weights"

    def _has_gradient(self, p: Tensor) -> None:
        if p.grad is not None:
            self.live.adopt([p.grad], "gradients")

    def _before_head(self, head: nn.Module, args: tuple[Any, ...]) -> None:
        """The blocks are done; what is alive is kept, and what comes is of the loss."""
        if self.live.phase != "forward":
            return
        self.live.claim(KEPT, born="forward")
        self.live.phase, self.live.usual = "loss", LOGITS
        hidden = args[0]
        if hidden.requires_grad:
            hidden.register_hook(self._loss_is_done)

    def _loss_is_done(self, grad: Tensor) -> None:
        self.live.phase, self.live.usual = "blocks back", TEMPORARY

    # Steps.

    def step(self, name: str) -> None:
        """One optimiser step with all its passes; its last part is called `name`."""
        if self.setting.accumulation > self.passes and not self.setting.step_in_backward:
            with self.live, self.live.during("between", TEMPORARY):
                self._gradients_of_zeros()
        for _ in range(self.passes):
            self._pass()
        with self.live, self.live.during(name, TEMPORARY):
            if not self.setting.step_in_backward:
                with self.live.during(f"{name}: clipping", TEMPORARY):
                    torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.optimizer.step()
            self.live.adopt(states_of(self.optimizer), "optimizer state")
            self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self) -> None:
        """A forward pass without gradients."""
        rows = replace(self.setting, batch=self.setting.eval_batch)
        self.model.eval()
        with self.live, self.live.during("evaluation", KEPT), torch.no_grad():
            ids = torch.zeros(rows.batch, rows.sequence, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16, enabled=rows.autocast):
                loss_of(rows, self.model, ids)
        self.model.train()

    def start_states(self) -> None:
        """The first step of the optimiser without the passes before it: gradients of zeros."""
        with self.live, self.live.during("refresh", TEMPORARY):
            self._gradients_of_zeros()
            self.optimizer.step()
            self.live.adopt(states_of(self.optimizer), "optimizer state")
            self.optimizer.zero_grad(set_to_none=True)

    def _gradients_of_zeros(self) -> None:
        for p in self.trained:
            p.grad = torch.zeros_like(p)
            self.live.adopt([p.grad], "gradients")

    def _pass(self) -> None:
        setting, live = self.setting, self.live
        with live:
            ids = torch.zeros(setting.batch, setting.sequence, dtype=torch.long)
            live.adopt([ids], KEPT)
            with live.during("forward", TEMPORARY):
                with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
                    loss = loss_of(setting, self.model, ids)
                live.claim(LOGITS, born="loss")
                live.claim(KEPT, born="forward")
            with live.during("loss back", LOGITS):
                loss.backward()  # type: ignore[no-untyped-call]
