"""The names that users may rely on. One that appears or goes is a decision, not an accident.

`python scripts/public_api.py --write` brings public_api.txt up to date; look at its diff.
"""

import importlib.util
import inspect
from pathlib import Path

import hirank

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {"HirankError", "__version__", "accelerate", "diagnose", "explain", "patch_peft"}
TOP_LEVEL |= {"hotswap_adapter", "prepare_hotswap"}
TOP_LEVEL |= {"register_quantised_linear"}
TOP_LEVEL |= {"restore", "Apollo", "ApolloMini", "Fira", "GaLoreAdamW", "QGaLoreAdamW"}


def load_script():
    spec = importlib.util.spec_from_file_location("public_api", ROOT / "scripts/public_api.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_ours(value: object) -> bool:
    """Defined in hirank, and not one of its modules, which Python adds as they are imported."""
    return getattr(value, "__module__", "").startswith("hirank") and not inspect.ismodule(value)


public_api = load_script()


def test_top_level_names():
    assert set(hirank.__all__) == TOP_LEVEL
    assert all(hasattr(hirank, name) for name in TOP_LEVEL)


def test_nothing_else_of_ours_is_public_by_accident():
    ours = {name for name, value in vars(hirank).items() if is_ours(value)}
    assert {name for name in ours if not name.startswith("_")} <= TOP_LEVEL


def test_every_top_level_name_is_documented():
    objects = [getattr(hirank, name) for name in TOP_LEVEL - {"__version__"}]
    assert [thing.__name__ for thing in objects if not thing.__doc__] == []


def test_every_public_module_says_what_it_exports():
    assert [name for name, names in public_api.modules() if names is None] == []


def test_exported_names_are_the_recorded_ones():
    recorded = public_api.RECORD.read_text(encoding="utf-8")
    assert public_api.listing() == recorded, "run: python scripts/public_api.py --write"
