"""Try a result in the terminal: one answer, or a conversation, with the adapter on or off."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jinja2.exceptions import TemplateError

from hirank.adapters.export import CONFIG_FILE, check_adapter, load_adapter, read_settings
from hirank.errors import HirankError
from hirank.train.model import ModelConfig, load_model, load_tokenizer

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

__all__ = ["Chat", "Found", "base_of", "command", "converse", "find", "load_chat"]

HELP = "/adapter off and /adapter on switch the adapter, /new starts over, /exit ends."


@dataclass(frozen=True)
class Found:
    """A model to talk to: its base, the adapter on it if there is one, the system text."""

    base: str
    adapter: Path | None
    system: str | None = None


# Finding.


def find(where: Path, base: str | None = None) -> Found:
    """What lies at `where`: a run (its best weights), an adapter, a checkpoint or a model.

    `base` replaces the base model that the adapter names. Raises HirankError if nothing is there
    or the adapter does not say how strong it is.
    """
    if not os.path.isdir(where):
        raise HirankError(f"There is no folder {where}; give a run or an adapter.")
    system = _system(where)
    for folder in (where / "adapter-best", where / "adapter", where):
        if os.path.isfile(folder / CONFIG_FILE):
            return Found(base or base_of(folder), folder, system)
    for folder in (where / "model-best", where / "model", where):
        if os.path.isfile(folder / "config.json"):
            return Found(str(folder), None, system)
    raise HirankError(f"{where} holds neither an adapter nor a model; has the run finished?")


def base_of(adapter: Path) -> str:
    """The base model an adapter was trained on. Raises HirankError if its settings are broken."""
    settings = read_settings(adapter)
    name = settings.get("base_model_name_or_path")
    if not name:
        raise HirankError(f"{adapter / CONFIG_FILE} names no base model; give it with --base.")
    return str(name)


def _system(where: Path) -> str | None:
    """The system text of the run that `where` is or lies in."""
    for folder in (where, where.parent):
        path = folder / "config.yaml"
        if path.is_file():
            text = _system_in(path)
            return str(text) if text else None
    return None


def _system_in(path: Path) -> object:
    """data.system of a run's settings; None for a config.yaml that is somebody else's."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    data = settings.get("data") if isinstance(settings, dict) else None
    return data.get("system") if isinstance(data, dict) else None


# Talking.


@dataclass
class Chat:
    """A loaded model and the conversation so far."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    system: str | None = None
    adapter_on: bool = True
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def has_adapter(self) -> bool:
        """Whether there is anything to switch."""
        return hasattr(self.model, "peft_config")

    def answer(self, text: str, emit: Callable[[str], None] = lambda piece: None) -> str:
        """The model's answer to `text` and all that was said before; pieces go to `emit`."""
        self.turns.append({"role": "user", "content": _text(text)})
        try:
            answer = self._generate(self._prompt(text), emit).strip()
        except HirankError:
            self.turns.pop()
            raise
        self.turns.append({"role": "assistant", "content": answer})
        return answer

    def _prompt(self, text: str) -> str:
        if self.tokenizer.chat_template is None:
            return text
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            prompt = self.tokenizer.apply_chat_template(
                system + self.turns, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise HirankError(
                f"The model's chat template refuses this conversation: {error}."
            ) from error
        return str(prompt)

    def _generate(self, prompt: str, emit: Callable[[str], None]) -> str:
        import torch

        from hirank.train.evaluate import greedy

        special = self.tokenizer.chat_template is None
        ids = self.tokenizer.encode(prompt, add_special_tokens=special, return_tensors="pt")
        ids = ids.to(self.model.device)
        with torch.no_grad(), self._precision(), self._switched():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=greedy(self.model, self.tokenizer, self.max_new_tokens),
                streamer=_streamer(self.tokenizer, emit),
            )
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    def _precision(self) -> Any:
        import torch

        return torch.autocast("cuda", torch.bfloat16, enabled=self.model.device.type == "cuda")

    def _switched(self) -> Any:
        from contextlib import nullcontext

        off = self.has_adapter and not self.adapter_on
        return self.model.disable_adapter() if off else nullcontext()


def _text(text: str) -> str:
    """`text` if a tokenizer can take it. Raises HirankError if not."""
    if not text.strip():
        raise HirankError("There is nothing to answer; write something.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise HirankError("This is not text in UTF-8; set the terminal to it.") from None
    return text


def _streamer(tokenizer: PreTrainedTokenizerBase, emit: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            emit(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def load_chat(
    where: Path,
    *,
    base: str | None = None,
    adapter: bool = True,
    max_new_tokens: int = 256,
    device: str = "auto",
) -> Chat:
    """Load what lies at `where` to talk to it. Raises HirankError, see `find`."""
    found = find(where, base)
    if found.adapter:
        check_adapter(found.adapter)  # before the base model loads
    config = ModelConfig.model_validate({"name": found.base, "device": device})
    tokenizer = load_tokenizer(config)
    model: Any = load_model(config)
    if found.adapter:
        model = load_adapter(model, found.adapter)
    model.eval()
    return Chat(model, tokenizer, max_new_tokens, found.system, adapter_on=adapter)


def converse(chat: Chat, console: Console) -> None:
    """Read and answer lines until the user leaves with /exit, Ctrl-D or Ctrl-C."""
    console.print(HELP, style="dim")
    while True:
        try:
            line = console.input("[bold]you>[/bold] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line == "/exit":
            return
        if line.startswith("/"):
            console.print(command(chat, line), style="dim")
        elif line:
            _say(chat, line, console)


def _say(chat: Chat, line: str, console: Console) -> None:
    try:
        chat.answer(line, lambda piece: console.print(piece, end="", markup=False, highlight=False))
    except KeyboardInterrupt:
        chat.turns.pop()
    except HirankError as error:
        console.print(str(error), style="yellow", markup=False, highlight=False)
    console.print()


def command(chat: Chat, line: str) -> str:
    """Carry out a line that starts with a slash, and say what it did."""
    words = line.split()
    if words == ["/new"]:
        chat.turns.clear()
        return "A new conversation."
    if words[0] == "/adapter" and words[1:] in (["on"], ["off"]):
        if not chat.has_adapter:
            return "There is no adapter here."
        chat.adapter_on = words[1] == "on"
        return f"The adapter is {words[1]}."
    return HELP
