"""Suite `init`: how long it takes to put adapters on a model that is there already."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from hirank.adapters.peft import patch_peft
from hirank.bench import arms as arms_
from hirank.bench.session import Result, Session, results
from hirank.bench.settings import Init
from hirank.bench.timing import Sample, calls

__all__ = ["ARMS", "run"]

_PATCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "peft-lora": nullcontext,
    "peft-dora": nullcontext,
    "hirank-lora": patch_peft,
    "hirank-dora": patch_peft,
}
ARMS = tuple(_PATCHES)


def run(settings: Init, session: Session) -> list[Result]:
    """Time `get_peft_model` as users call it, inside `hirank.patch_peft()` for hirank's arms."""
    base = session.base(settings.model)
    names = session.chosen(ARMS)
    _, samples = session.measure({name: _step(base, name, settings, session) for name in names})
    return results(samples, "wall_s")


def _step(base: nn.Module, name: str, settings: Init, session: Session) -> Callable[[], Sample]:
    def step() -> Sample:
        model = arms_.copy_sharing_weights(base)

        def create() -> None:
            with _PATCHES[name]():
                arms_.adapt(model, dora="dora" in name, rank=settings.rank, to="all-linear")

        return {"wall_s": calls(create, 1, session.device)}

    return step
