"""Import hooks that let SGLang's modules be imported beside a CPU torch.

`install()` is called from `sglang_cpu.pth` at interpreter start, so it reaches every process that
SGLang spawns. It imports nothing heavy. The cure for torchvision serves every program of the
environment (transformers cannot load a model without it), the others SGLANG_USE_CPU_ENGINE=1 only.

triton       imported unconditionally, though 1 GB large and of no use here: stubs from SGLang's
             own wheel.
torchvision  PyPI's CUDA build dies at import, registering fakes for operators that it could not
             load: their schemas are declared first.
sgl_kernel   the CUDA wheel `sglang-kernel` has no CPU operators: `standins/sgl_kernel`, in torch.

The hooks for triton and sgl_kernel stand last on `sys.meta_path`: an installed real one wins.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import sglang_cpu

STANDINS = Path(__file__).parent / "standins"


def install() -> None:
    """Install the import hooks and the environment defaults. Idempotent."""
    if not _installed(TorchvisionSchemas):
        sys.meta_path.insert(0, TorchvisionSchemas())
    if not sglang_cpu.wanted():
        return
    environment_defaults()
    if not _installed(StandInFinder):
        sys.meta_path.append(StandInFinder())
        sys.meta_path.append(TritonStubs())


def _installed(finder_class: type) -> bool:
    return any(isinstance(finder, finder_class) for finder in sys.meta_path)


def environment_defaults() -> None:
    """Let SGLang find its pre-built page hash, and ninja, when run as .venv/bin/python."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    if shutil.which("ninja") is None:
        scripts = str(Path(sys.prefix) / "bin")
        os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


class TorchvisionSchemas:
    """Declares the operators torchvision registers fakes for, where its own library cannot."""

    def __init__(self) -> None:
        self._library: Any = None  # torch drops the schemas together with this object

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Never finds anything; acts just before `torchvision` is imported."""
        if name != "torchvision" or self._library is not None:
            return
        import torch

        if torch.cuda.is_available() or self._loads_by_itself(torch):
            return
        self._library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            self._library.define(
                f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )

    def _loads_by_itself(self, torch: ModuleType) -> bool:
        """True with a CPU build of torchvision: its operators load and need no help."""
        for folder in map(Path, sys.path):
            library = next((folder / "torchvision").glob("_C*.so"), None)
            if library is not None:
                try:
                    torch.ops.load_library(str(library))
                except OSError:
                    return False
                return True
        return False


class StandInFinder:
    """Serves `sgl_kernel` from `standins/` where no real one is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "sgl_kernel" or not sglang_cpu.active():
            return None
        package = STANDINS / name
        return importlib.util.spec_from_file_location(
            name, package / "__init__.py", submodule_search_locations=[str(package)]
        )


class TritonStubs:
    """Answers `import triton[.x]` with the mock modules of `sglang/_platform_stubs.py`.

    Upstream uses them on Apple Silicon; the names below are those that SGLang and torch subclass,
    compare or call at import time.
    """

    def __init__(self) -> None:
        self._stubs: Any = None
        self._names: dict[str, dict[str, Any]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "triton":
            return None
        if self._stubs is None and not self._load():
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def _load(self) -> bool:
        # Not `import sglang._platform_stubs`: that would run sglang/__init__.py.
        sources = (Path(folder) / "sglang" / "_platform_stubs.py" for folder in sys.path)
        source = next((file for file in sources if file.is_file()), None)
        if source is None:
            return False
        spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", source)
        assert spec is not None and spec.loader is not None
        self._stubs = stubs = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = stubs
        spec.loader.exec_module(stubs)

        def stub(name: str, base: type = stubs._StubBase) -> type:
            return type(name, (base,), {})

        self._names = {
            "triton": {
                "__version__": "3.0.0",
                "cdiv": stubs._cdiv,
                "next_power_of_2": stubs._next_power_of_2,
                "Config": stubs._Config,
            },
            "triton.language": {"constexpr": _Constexpr, "dtype": stub("dtype", object)},
            "triton.runtime.jit": {
                "JITFunction": stub("JITFunction", object),
                "KernelInterface": stub("KernelInterface"),
            },
            "triton.runtime.cache": {"triton_key": stubs._triton_key},
            "triton.runtime.autotuner": {
                "OutOfResources": stub("OutOfResources", Exception),
                "PTXASError": stub("PTXASError", Exception),
            },
            "triton.compiler": {"CompiledKernel": stub("CompiledKernel")},
            "triton.compiler.compiler": {
                "ASTSource": stub("ASTSource"),
                "triton_key": stubs._triton_key,
            },
            "triton.backends.compiler": {"GPUTarget": stub("GPUTarget")},
        }
        return True

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = self._stubs._MockModule(spec.name)
        for name, value in self._names.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Attribute access on a mock makes children of its own: import the prepared ones first, so
        # that `triton.language` and `import triton.language` are the same object.
        if module.__name__ == "triton":
            importlib.import_module("triton.runtime")
            importlib.import_module("triton.backends")
        for name in self._names:
            if name.rpartition(".")[0] == module.__name__:
                importlib.import_module(name)


class _Constexpr:
    """`tl.constexpr(3)` as SGLang's kernel files use it at import."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
