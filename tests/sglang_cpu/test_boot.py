"""What the import hooks give, and that they give nothing where they are not wanted."""

from __future__ import annotations

import subprocess
import sys


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_stand_ins_are_not_importable_without_the_cpu_engine():
    assert run('import importlib.util; print(importlib.util.find_spec("sgl_kernel"))') == "None"


def test_the_stand_ins_are_importable_with_the_cpu_engine():
    code = """
import sgl_kernel.kvcacheio, triton, triton.language as tl
print(callable(sgl_kernel.kvcacheio.transfer_kv_direct), triton.cdiv(7, 2), tl.constexpr(3).value)
print(triton.language is tl, callable(triton.jit))
"""
    assert run(code, SGLANG_USE_CPU_ENGINE="1").splitlines() == ["True 4 3", "True True"]


def test_nothing_is_active_where_cuda_is_available():
    code = """
import importlib.util, sys, torch
torch.cuda.is_available = lambda: True
import sglang_cpu, sglang_cpu.plugin
print(sglang_cpu.active(), importlib.util.find_spec("sgl_kernel"))
sglang_cpu.plugin.register()
print("sglang" in sys.modules)
"""
    assert run(code, SGLANG_USE_CPU_ENGINE="1").splitlines() == ["False None", "False"]


def test_an_installed_triton_is_preferred_to_the_stubs(tmp_path):
    (tmp_path / "triton.py").write_text("real = True\n")
    code = "import triton; print(triton.real)"
    assert run(code, SGLANG_USE_CPU_ENGINE="1", PYTHONPATH=str(tmp_path)) == "True"


def test_torchvision_can_be_imported_beside_a_cpu_torch():
    assert run("import torchvision; print(torchvision.ops.nms.__name__)") == "nms"


def test_extensions_are_found_in_the_virtual_environment_unless_told_otherwise():
    code = "import os; print(os.environ.get('TORCH_EXTENSIONS_DIR'))"
    assert run(code, SGLANG_USE_CPU_ENGINE="1") == f"{sys.prefix}/torch_extensions"
    assert run(code, SGLANG_USE_CPU_ENGINE="1", TORCH_EXTENSIONS_DIR="/x") == "/x"
    assert run(code) == "None"
