"""In a process of a run, once PEFT is imported: make it create converted layers, and say so."""

import functools
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

import hirank  # its functions come with PEFT's internals: not before the versions are checked
from hirank.errors import HirankError
from hirank.launch.interpreter import check_versions
from hirank.launch.records import Record, sentence, table, write_record
from hirank.launch.trainers import unwrap

__all__ = ["first_call", "install"]


class _Watched:
    """One model with adapters, from its creation to the first call of one of its layers."""

    def __init__(self, model: nn.Module, number: int) -> None:
        self.model, self.number = weakref.ref(model), number


_folders: dict[Path, dict[str, Any]] = {}  # of the runs this process is part of: its settings
_models: "weakref.WeakKeyDictionary[nn.Module, _Watched]" = weakref.WeakKeyDictionary()
_layers: "weakref.WeakKeyDictionary[nn.Module, _Watched]" = weakref.WeakKeyDictionary()
_said: set[str] = set()


def install(folder: str) -> None:
    """Make PEFT create converted layers in this process; a second time changes nothing.

    Ends the process with one sentence and exit code 2 where hirank cannot work.
    """
    where = Path(folder)
    if where in _folders:
        return
    settings = json.loads((where / "settings").read_text(encoding="utf-8"))
    try:
        check_versions({"torch": torch.__version__, "peft": peft.__version__}, sys.executable)
        hirank.patch_peft(**settings["options"])
    except HirankError as error:
        sys.stderr.write(f"hirank run: {error}\n")
        raise SystemExit(2) from None
    (where / f"{os.getpid()}.peft").touch()
    if not _folders:
        _follow(peft.LoraModel)
    _folders[where] = settings


def _follow(owner: Any) -> None:
    original = owner.inject_adapter

    @functools.wraps(original)
    def inject_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _created(kwargs.get("model", args[0] if args else None))
        return result

    owner.inject_adapter = inject_adapter


def _created(model: Any) -> None:
    """Record what was made, and wait for a layer's first call to tell what became of it."""
    if not isinstance(model, nn.Module):
        return
    watched = _models.setdefault(model, _Watched(model, len(_models)))
    rows = hirank.explain(model).rows
    _record(watched, "created", rows)
    for row in rows:
        layer = model.get_submodule(row.name)
        if layer not in _layers:
            _layers[layer] = watched
            layer.register_forward_pre_hook(first_call)


def first_call(layer: Any, args: Any) -> None:
    """Forward pre-hook of the adapted layers until one of them is called with its adapters on.

    By then the model lies where it is trained and how it is trained: only now can be said which
    way its layers go. A function of a module, so that a model can be copied and pickled with it.
    """
    if torch.compiler.is_compiling():
        return
    watched = _layers.get(layer)
    model = None if watched is None else watched.model()
    if watched is None or model is None:  # a copy: the first model speaks for it
        return _leave(layer)
    if layer.disable_adapters or layer.merged:
        return
    for module in model.modules():
        if _layers.pop(module, None) is not None:
            _leave(module)
            unwrap(module)
    rows = hirank.explain(model).rows
    _record(watched, "ran", rows)
    _say(rows)


def _leave(layer: nn.Module) -> None:
    hooks = layer._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is first_call]:
        del hooks[key]


def _record(watched: _Watched, stage: str, rows: Any) -> None:
    record: Record = {
        "pid": os.getpid(),
        "rank": _rank(),
        "model": watched.number,
        "stage": stage,
        "versions": {
            "hirank": hirank.__version__, "peft": peft.__version__, "torch": torch.__version__
        },
        "layers": _plain(rows),
    }  # fmt: skip
    for folder in _folders:
        write_record(folder, record)


def _plain(rows: Any) -> list[dict[str, str]]:
    return [
        {"name": row.name, "kind": row.kind, "tier": row.tier, "reason": row.reason} for row in rows
    ]


def _rank() -> int:
    distributed = torch.distributed
    started = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if started else 0


def _say(rows: Any) -> None:
    """On rank 0: one line, once for all models it is true of; the table too, if asked for."""
    layers = _plain(rows)
    line = sentence(layers)
    if _rank() != 0 or line in _said:
        return
    _said.add(line)
    if any(settings["verbose"] for settings in _folders.values()):
        line = f"{table(layers)}\n{line}"
    bars = sys.modules.get("tqdm.auto")
    if bars is not None:
        bars.tqdm.write(line, file=sys.stderr)  # above a progress bar, not into it
    else:
        sys.stderr.write(f"{line}\n")
