"""The base model: where it comes from, and how it is loaded.

A model is a folder in Hugging Face's format, a `.gguf` file (or a folder with exactly one), or
a name on the Hub. Everything that can be said about it is said before its weights are read.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import struct
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hirank.errors import HirankError
from hirank.train.strict import Strict

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "HUB_NAME",
    "ModelConfig",
    "Source",
    "learned_positions",
    "load_architecture",
    "load_model",
    "load_tokenizer",
    "locate",
    "meta_model",
    "pick_device",
    "pick_dtype",
]

HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


class ModelConfig(Strict):
    """Which base model, and how to load it."""

    name: str
    """A model folder, a `.gguf` file, or a name on the Hugging Face Hub."""

    revision: str | None = None
    """Branch, tag or commit, for a model on the Hub."""

    tokenizer: str | None = None
    """A tokenizer from somewhere else: a folder or a Hub name. Default: the model's own."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the base weights. auto: float32 on a CPU and for method full, else bfloat16."""

    attention: str | None = None
    """Attention implementation of Transformers, such as sdpa or eager. Default: its own choice."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train. auto: the GPU if there is one."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""


@dataclass(frozen=True)
class Source:
    """Where Transformers finds a model: a folder or Hub name, and a file in it if it is GGUF."""

    name: str
    gguf: str | None = None
    local: bool = True

    @property
    def path(self) -> str:
        """The model as one name: the folder, the GGUF file or the Hub name."""
        return str(Path(self.name) / self.gguf) if self.gguf else self.name


def locate(name: str) -> Source:
    """Find the model without loading anything. Raises HirankError if a folder does not exist."""
    path = Path(name).expanduser()
    if os.path.isfile(path):  # unlike Path's, False for what is no possible name
        return _file_source(path)
    if os.path.isdir(path):
        return _folder_source(path)
    if not HUB_NAME.fullmatch(name) or (path.parent != Path(".") and os.path.isdir(path.parent)):
        raise HirankError(f"There is no model folder {name}{_similar(path)}.")
    return Source(name, local=False)


def _file_source(path: Path) -> Source:
    if path.suffix != ".gguf":
        raise HirankError(f"{path} is a file; give a model folder, a .gguf file or a Hub name.")
    return Source(str(path.parent.resolve()), gguf=path.name)


def _folder_source(path: Path) -> Source:
    if (path / "config.json").is_file():
        return Source(str(path.resolve()))
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _file_source(ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise HirankError(f"{path} holds several GGUF files ({names}); name the one to load.")
    raise HirankError(f"The folder {path} holds no model: no config.json and no .gguf file in it.")


def _similar(path: Path) -> str:
    """The part of a sentence that names folders beside `path` with a similar name."""
    beside = path.parent.iterdir() if os.access(path.parent, os.R_OK | os.X_OK) else ()
    siblings = [p.name for p in beside if p.is_dir()]
    close = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.5)
    if not close:
        return ""
    return "; similar names there: " + ", ".join(str(path.parent / name) for name in close)


# Loading. Everything below imports torch.


def pick_device(config: ModelConfig) -> torch.device:
    """The device to train on."""
    import torch

    if config.device == "cuda" and not torch.cuda.is_available():
        raise HirankError("model.device is cuda, but PyTorch sees no GPU here; set it to cpu.")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda")


def pick_dtype(config: ModelConfig, device: torch.device, *, full: bool) -> torch.dtype:
    """Of the base weights: bfloat16 only where they are frozen and on a GPU, unless asked."""
    import torch

    if config.dtype != "auto":
        return torch.float32 if config.dtype == "float32" else torch.bfloat16
    return torch.float32 if full or device.type == "cpu" else torch.bfloat16


def _pretrained_args(config: ModelConfig, source: Source) -> dict[str, Any]:
    args: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if source.gguf:
        args["gguf_file"] = source.gguf
    if config.revision and not source.local:
        args["revision"] = config.revision
    return args


class _Readable:
    """Turns what Transformers raises about a model it cannot read into one sentence."""

    def __init__(self, what: str, name: str, local: bool) -> None:
        self.what, self.name, self.local = what, name, local

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from huggingface_hub.errors import StrictDataclassError
        from safetensors import SafetensorError

        kinds = OSError | ValueError | KeyError | ImportError | SafetensorError
        kinds |= StrictDataclassError | TypeError | struct.error  # a config or GGUF file is broken
        if isinstance(error, HirankError) or not isinstance(error, kinds):
            return
        where = "the folder" if self.local else "the Hugging Face Hub; there is no such folder here"
        hint = "" if self.local else _similar(Path(self.name))
        lines = str(error).strip().splitlines() or [type(error).__name__]
        more = lines[0].endswith(":") and len(lines) > 1
        said = (f"{lines[0]} {lines[1].strip()}" if more else lines[0]).rstrip(".")
        raise HirankError(
            f"Cannot read the {self.what} of {self.name} from {where}{hint} ({said})."
        ) from error


def load_architecture(config: ModelConfig) -> Any:
    """Read the model's config, no weights."""
    from transformers import AutoConfig

    source = locate(config.name)
    found: Any
    with _Readable("configuration", config.name, source.local):
        found = AutoConfig.from_pretrained(source.name, **_pretrained_args(config, source))
    if hasattr(found, "quantization_config") and source.gguf:
        del found.quantization_config  # the weights are widened on loading
    return found


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer, with a padding token (the end token if it has none of its own)."""
    from transformers import AutoTokenizer

    source = _tokenizer_source(config)
    with _Readable("tokenizer", config.tokenizer or config.name, source.local):
        tokenizer = AutoTokenizer.from_pretrained(source.name, **_pretrained_args(config, source))
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise HirankError(
                f"The tokenizer of {config.name} has neither a padding nor an end token; "
                "name another one in model.tokenizer."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _tokenizer_source(config: ModelConfig) -> Source:
    """A folder with a tokenizer need not hold a model."""
    if config.tokenizer and Path(config.tokenizer).is_dir():
        return Source(str(Path(config.tokenizer).resolve()))
    return locate(config.tokenizer or config.name)


def meta_model(config: ModelConfig, architecture: Any) -> Any:
    """The model with shapes and without memory, to check settings against."""
    import torch
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with _Readable("architecture", config.name, True), torch.device("meta"):
        return build(architecture, trust_remote_code=config.trust_remote_code)


def learned_positions(model: Any) -> int | None:
    """How many positions the model has embeddings for; None where it computes them."""
    from torch import nn

    limit = getattr(model.config, "max_position_embeddings", None)
    tokens = model.get_input_embeddings()
    others = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens)
    # OPT and BART keep two rows more than they have positions
    learnt = limit is not None and any(limit <= m.num_embeddings <= limit + 2 for m in others)
    return limit if learnt else None


def load_model(config: ModelConfig, *, full: bool = False) -> Any:
    """The base model with its weights, on the device it will be trained on.

    `full` says that the base weights themselves will be trained, which keeps them in float32.
    """
    from transformers import AutoModelForCausalLM

    source = locate(config.name)
    device = pick_device(config)
    args = _pretrained_args(config, source) | {"dtype": pick_dtype(config, device, full=full)}
    if config.attention:
        args["attn_implementation"] = config.attention
    hidden = redirect_stderr(io.StringIO()) if source.gguf else nullcontext()  # a progress bar
    with hidden, _Readable("weights", config.name, source.local):
        found: Any = AutoModelForCausalLM.from_pretrained(
            source.name, output_loading_info=True, ignore_mismatched_sizes=True, **args
        )
    model, loading = found
    _check_complete(loading, config.name)
    if source.gguf:
        model = _plain(model, source.path)
    return model.to(device)


def _check_complete(loading: dict[str, Any], name: str) -> None:
    """Transformers fills what a file lacks with random numbers; nobody wants to train on those."""
    for key, fault in (("missing_keys", "are missing"), ("mismatched_keys", "have another shape")):
        faulty = sorted(k if isinstance(k, str) else k[0] for k in loading.get(key) or ())
        if faulty:
            raise HirankError(
                f"The weights of {name} do not fit its config.json: {len(faulty)} {fault} "
                f"({faulty[0]} first); get the whole model again."
            )


def _plain(model: Any, name: str) -> Any:
    """A GGUF model whose weights have been widened, as an ordinary one that can be trained."""
    architecture = model.config
    if hasattr(architecture, "quantization_config"):
        del architecture.quantization_config
    plain = type(model)._from_config(architecture, dtype=model.dtype)
    plain.load_state_dict(model.state_dict(), strict=True)
    plain.generation_config = model.generation_config
    plain.name_or_path = plain.config._name_or_path = name
    return plain
