"""What every Python process of a run executes first: `process.py` copies it as sitecustomize.py.

It waits for PEFT to be imported and costs a process that never does about a millisecond, so it
imports nothing that Python has not loaded by then. It has to load in older versions of Python, if
only to say that they are too old.
"""

from __future__ import annotations

import sys
from os import path

__all__ = ["Finder", "start"]

OLDEST = (3, 11)
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Finder:
    """Finds hirank where the run was started from, and acts when PEFT has been imported.

    The hirank that was called is the one that runs, also in a virtual environment that has none
    or another; nothing else of its site-packages becomes visible there.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, where: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "hirank":
            return self._hirank()
        if name != "peft":
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, where, target)
            if spec is not None:
                return self._followed(spec)
        return None

    def _hirank(self) -> ModuleSpec | None:
        from importlib.util import spec_from_file_location

        with open(path.join(self.folder, "package"), encoding="utf-8") as file:
            package = file.read()
        init = path.join(package, "__init__.py")
        return spec_from_file_location("hirank", init, submodule_search_locations=[package])

    def _followed(self, spec: ModuleSpec) -> ModuleSpec:
        loader = spec.loader
        if loader is not None:
            # on the instance: the loader keeps its class, and all else that is asked of it
            loader.exec_module = self._then_convert(loader.exec_module)  # type: ignore
        return spec

    def _then_convert(self, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def execute_and_convert(module: ModuleType) -> None:
            execute(module)
            if sys.version_info < OLDEST:
                found = ".".join(map(str, sys.version_info[:2]))
                sys.stderr.write(
                    f"hirank run: {sys.executable} is Python {found}: use 3.11 or newer.\n"
                )
                raise SystemExit(2)
            from hirank.launch.child import install

            install(self.folder)

        return execute_and_convert


def start(file: str) -> None:
    """Wait for PEFT, and run the sitecustomize that this one stands in front of, if there is one.

    Args:
        file: where this module lies under the name sitecustomize.py.
    """
    folder = path.dirname(path.abspath(file))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    sys.meta_path.insert(0, Finder(folder))
    own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":
    start(__file__)
