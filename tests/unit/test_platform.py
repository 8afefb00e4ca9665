"""PlatformFL: its answers are SGLang's own classes and numbers for the device."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_fl import plugin as plugin_module
from sglang_fl.config import load_settings
from sglang_fl.platform import PLATFORMS, PlatformFL
from sglang_fl.plugin import PLATFORM_CLASS, Plugin, activate_platform, is_platform_needed


@pytest.fixture
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PlatformFL:
    """The platform of the parameter's name."""
    monkeypatch.setattr(plugin_module, "_plugin", Plugin(load_settings({}), request.param))
    return PlatformFL()


@pytest.mark.parametrize("platform", ["cpu"], indirect=True)
def test_on_a_cpu_the_answers_are_sglangs_own(platform: PlatformFL) -> None:
    """Given the CPU platform, when SGLang asks, then it gets what it uses without a platform."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.utils.common import get_cpu_memory_capacity

    assert platform.is_out_of_tree() and not platform.is_cuda_alike()
    assert platform.get_mha_kv_pool_cls() is MHATokenToKVPool
    assert platform.get_device_total_memory() == int((get_cpu_memory_capacity() or 0) * 2**20)
    arguments: dict[str, Any] = {"dtype": None, "device": "cpu", "kvcache": None, "need_sort": False}
    allocator = platform.get_paged_allocator_cls()
    assert type(allocator(64, page_size=1, **arguments)) is TokenToKVPoolAllocator
    assert type(allocator(64, page_size=16, **arguments)) is PagedTokenToKVPoolAllocator
    assert platform.get_dispatch_key_name() in ("native", "cpu")
    assert not platform.is_pin_memory_available(device="cpu")


@pytest.mark.parametrize("platform", ["cpu", "cuda"], indirect=True)
def test_the_latent_attention_pool_takes_what_sglang_hands_every_platform(platform: PlatformFL) -> None:
    """Given SGLang's call for MLA with index_head_dim, when the pool is made, then it is SGLang's own, without it."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    pool = platform.get_mla_kv_pool_cls()(
        64,
        page_size=1,
        dtype=torch.float32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        index_head_dim=None,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        start_layer=0,
        end_layer=0,
    )
    assert type(pool) is MLATokenToKVPool


@pytest.mark.parametrize("name", sorted(PLATFORMS))
def test_every_dotted_name_of_a_platform_exists(name: str) -> None:
    """Given a platform's data, when its modules are looked up, then each holds the name (read, not imported)."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    for field, value in vars(PLATFORMS[name]).items():
        if not isinstance(value, str) or not value.startswith("sglang."):
            continue
        module, _, attribute = value.rpartition(".")
        parts = module.split(".")
        top = find_spec(parts[0])
        assert top is not None and top.submodule_search_locations
        path = Path(top.submodule_search_locations[0]).joinpath(*parts[1:]).with_suffix(".py")
        names = {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}
        assert attribute in names, (field, value)


def test_the_platform_has_every_member_that_sglang_declares_as_consulted() -> None:
    """Given SGLang's interface, when compared, then no member that raises by default is left unanswered."""
    from sglang.srt.platforms.interface import SRTPlatform

    left = [
        name
        for name, member in inspect.getmembers(SRTPlatform, inspect.isfunction)
        if "raise NotImplementedError" in inspect.getsource(member) and getattr(PlatformFL, name) is member
    ]
    # Declared as planned: SGLang 0.5.11 never asks these.
    assert set(left) <= {"get_device_name", "get_device_uuid", "get_available_memory"}


@pytest.mark.parametrize(
    ("name", "real_kernel", "selected", "needed"),
    [
        ("cuda", True, "", False),
        ("cuda", True, "sglang_fl", True),
        ("cuda", False, "", True),
        ("cpu", False, "", True),
        ("ascend", False, "", True),
        ("musa", True, "", True),
    ],
)
def test_the_platform_is_active_where_sglang_alone_is_not_enough(
    monkeypatch: pytest.MonkeyPatch, name: str, real_kernel: bool, selected: str, needed: bool
) -> None:
    """Given a device and what is installed, when asked, then only NVIDIA with a real sgl_kernel keeps SGLang's own."""
    monkeypatch.setattr(plugin_module, "has_real_sgl_kernel", lambda: real_kernel)
    monkeypatch.setattr(plugin_module, "_plugin", Plugin(load_settings({}), name))
    if selected:
        monkeypatch.setenv("SGLANG_PLATFORM", selected)
    else:
        monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert is_platform_needed(name) is needed
    assert activate_platform() == (PLATFORM_CLASS if needed else None)


def test_a_platform_without_its_plugin_is_reported() -> None:
    """Given SGLANG_PLUGINS that leaves the plugin out and SGLANG_PLATFORM that names ours, then a warning says so."""
    script = (
        "import logging; logging.basicConfig(); from sglang.srt.plugins import load_plugins; load_plugins(); "
        "from sglang.srt.platforms import current_platform; current_platform.get_mha_kv_pool_cls(); "
        "print(type(current_platform).__name__)"
    )
    variables = {"SGLANG_PLUGINS": "__none__", "SGLANG_PLATFORM": "sglang_fl", "SGLANG_FL_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "PlatformFL"
    assert "the platform sglang_fl without the plugin, which SGLANG_PLUGINS=__none__ leaves out" in done.stderr


def test_the_stand_in_is_not_taken_for_the_vendors_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given only the stand-in, then a package named sgl_kernel, when asked, then only the latter is the real one."""
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)  # SGLang may have imported the stand-in by now
    assert not plugin_module.has_real_sgl_kernel()
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel/__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object')")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugin_module.has_real_sgl_kernel()
