"""What every test gets: no network, a seed, and memory that is never zero by luck."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Read by huggingface_hub and tokenizers when they are imported, so set before either is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from helpers import save_tiny_model, tiny_tokenizer

SEED = 0


def pytest_configure(config: pytest.Config) -> None:
    """Give each xdist worker one core: two workers with two threads each only wait.

    Started in the background by a shell, we ignore interrupts, and so would the commands that tests
    interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_and_seeded() -> Iterator[None]:
    """Fill fresh memory with NaN (integers with their maximum), and start from one seed.

    Deterministic mode poisons `torch.empty`, so a kernel that forgets an element shows up.
    It also warns about CUDA operations that have no deterministic form; that one warning is
    exempt in pyproject.toml.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(SEED)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tiny byte-level tokenizer with a ChatML template."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as a hub would serve it: random two-layer Llama and its tokenizer.

    Shared by the whole session: read it, do not write to it.
    """
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where there is none, and say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
