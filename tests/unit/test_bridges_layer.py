"""Layer 2 as a whole: on or off and why, refused early, piecewise graphs, the gated delta rule, the first report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch

from sglang_fl.dispatch import OpImpl, OpManager, OpRegistry, SelectionPolicy, configure, set_manager
from sglang_fl.dispatch.backends.reference import register_ops as reference
from sglang_fl.dispatch.types import BackendImplKind
from sglang_fl.selection import SelectionError
from sglang_fl.sglang_hooks.operators import (
    delta_rule,
    explain_operator,
    off_reason,
    operator_layer,
    piecewise,
    unknown_names,
)
from sglang_fl.sglang_hooks.operators.binding import Binder
from sglang_fl.sglang_hooks.operators.layer import OperatorLayer
from sglang_fl.sglang_hooks.registration import misfits
from tests.unit.bridge_cases import Chip, settings


def never(message: str) -> NoReturn:
    """Where nothing is refused."""
    raise AssertionError(message)


@pytest.fixture
def registry() -> Iterator[OpRegistry]:
    """This process's registry: the reference alone, and what a test adds."""
    made = OpRegistry()
    reference.register_builtins(made)
    set_manager(OpManager(made))
    yield made
    set_manager(None)
    configure(settings())


def layer(platform: str = "cpu", has_kernels: bool = False, **variables: str) -> OperatorLayer:
    """Layer 2 with these settings."""
    return operator_layer(settings(**variables), platform, has_kernels, print, never)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"SGLANG_FL_OOT_ENABLED": "0"}, "oot_enabled is off (from SGLANG_FL_OOT_ENABLED)"),
        ({"SGLANG_FL_OOT_WHITELIST": "LayerNorm"}, "SGLANG_FL_OOT_WHITELIST leaves no operator class"),
        ({"SGLANG_FL_OOT_BLACKLIST": "MultiPlatformOp"}, "SGLANG_FL_OOT_BLACKLIST leaves no operator class"),
    ],
)
def test_with_nothing_left_there_is_no_hook(registry: OpRegistry, variables: dict[str, str], reason: str) -> None:
    """Given the switch off, or lists that leave nothing, then no hook is made, and the report says why."""
    assert layer(**variables) == OperatorLayer(False, reason)
    assert off_reason(settings(**variables)) == reason


def test_what_is_on_says_in_which_order(registry: OpRegistry) -> None:
    """Given an order, strict mode and a list, when described, then the report holds all three."""
    made = layer(SGLANG_FL_PREFER="reference", SGLANG_FL_STRICT="1", SGLANG_FL_OOT_BLACKLIST="RotaryEmbedding,TopK")
    assert made.is_on
    assert made.reason == (
        "order reference, flagos, vendor (from SGLANG_FL_PREFER); strict, without fallback; "
        "without RotaryEmbedding, TopK"
    )
    assert [hook.target.rpartition(".")[2] for hook in made.hooks] == [
        "dispatch_forward",
        "_handle_piecewise_cuda_graph",
    ]
    assert misfits(made.hooks) == []
    assert made.lines == (delta_rule.NOT_OFFERED,)
    assert layer(SGLANG_FL_OOT_WHITELIST="RMSNorm").reason.endswith("; only RMSNorm")


def test_unknown_operators_and_classes_are_told_with_a_suggestion(registry: OpRegistry) -> None:
    """Given misspelt names and right ones, when reported, then only the misspelt are told, with what is meant."""
    lines = unknown_names(
        settings(
            SGLANG_FL_PER_OP="rms_nrom=reference;communicator=reference;chunk_gated_delta_rule=vendor;topk=reference",
            SGLANG_FL_OOT_WHITELIST="RMSNorm,SiluAndMull",
        )
    )
    assert len(lines) == 2
    assert "'SiluAndMull'" in lines[0] and "Did you mean 'SiluAndMul'?" in lines[0]
    assert "'rms_nrom'" in lines[1] and "Did you mean 'rms_norm'?" in lines[1]
    assert unknown_names(settings(SGLANG_FL_OOT_ENABLED="0", SGLANG_FL_PER_OP="rms_nrom=reference")) == []


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"SGLANG_FL_PER_OP": "rms_norm=vendor|reference"}, "rms_norm"),
        ({"SGLANG_FL_PER_OP": "topk=flagos|reference", "SGLANG_FL_PREFER": "reference"}, "topk"),
    ],
)
def test_strict_refuses_early_what_no_model_could_be_served_with(
    registry: OpRegistry, variables: dict[str, str], named: str
) -> None:
    """Given strict and an order whose first choice is nowhere, when loaded, then it is refused with its name."""
    with pytest.raises(SelectionError, match=rf"No available implementation for {named}"):
        layer(SGLANG_FL_STRICT="1", **variables)
    assert layer(**variables).is_on, "without strict the next one is used"


def test_strict_refuses_a_preferred_kind_that_is_there_for_nobody(registry: OpRegistry) -> None:
    """Given strict and a chip that is not there, when it is preferred, then refused; where one operator has it, not."""
    chip = Chip()
    impls = [chip._impl(op_name) for op_name in ("rms_norm", "silu_and_mul")]
    absent = [OpImpl(impl.op_name, impl.impl_id, impl.kind, _unavailable(impl.fn), impl.vendor) for impl in impls]
    registry.register_many(absent)
    with pytest.raises(SelectionError, match="is_available says no"):
        layer(SGLANG_FL_STRICT="1", SGLANG_FL_PREFER="vendor", SGLANG_FL_OOT_WHITELIST="RMSNorm,SiluAndMul")
    assert layer(SGLANG_FL_STRICT="1", SGLANG_FL_PREFER="vendor").is_on, "the other operators have no vendor to miss"


def _unavailable(fn: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper._is_available = lambda: False  # type: ignore[attr-defined]
    return wrapper


def test_strict_with_the_vendor_is_met_by_sglangs_own_methods(registry: OpRegistry) -> None:
    """Given strict, vendor first and SGLang's own kernels, then nothing is refused, and without them it is."""
    variables = {"SGLANG_FL_STRICT": "1", "SGLANG_FL_PER_OP": "fused_moe=vendor"}
    assert layer("cuda", True, **variables).is_on
    for platform, denied in (("cpu", ""), ("cuda", "cuda")):
        with pytest.raises(SelectionError, match="No available implementation for fused_moe"):
            layer(platform, True, SGLANG_FL_DENY_VENDORS=denied, **variables)


def test_explain_has_sglangs_own_method_among_the_candidates(registry: OpRegistry) -> None:
    """Given SGLang's kernels, when an operator is explained, then its method is chosen or passed over with the rest."""
    set_manager(OpManager(registry, SelectionPolicy(prefer="vendor")))
    assert "chosen      vendor.nvidia" in explain_operator("fused_moe", "cuda", True)
    assert "vendor.nvidia" not in explain_operator("fused_moe", "cpu", False)


# ---- piecewise graphs ----


def server_arguments(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Any:
    """SGLang's real arguments, with nothing in them and in this machine that turns piecewise graphs off."""
    from sglang.srt import platforms, server_args
    from sglang.srt.platforms.interface import SRTPlatform

    monkeypatch.setattr(platforms, "current_platform", SRTPlatform())
    made = server_args.ServerArgs(model_path="dummy", **arguments)
    monkeypatch.setattr(server_args, "is_cpu", lambda: False)

    class ModelConfig:
        is_piecewise_cuda_graph_disabled_model = False
        is_multimodal = False

    monkeypatch.setattr(type(made), "get_model_config", lambda self: ModelConfig())
    monkeypatch.setattr(server_args, "check_gguf_file", lambda path: False)
    return made


def handle(arguments: Any) -> list[str]:
    """Run the hook around SGLang's real method; what it told."""
    told: list[str] = []
    hook = piecewise.hook(told.append, SystemExit)
    hook.function(type(arguments)._handle_piecewise_cuda_graph, arguments)
    return told


def test_piecewise_graphs_are_turned_off_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a server that would use them, when layer 2 is on, then they are off, with the reason; else they stay on."""
    arguments = server_arguments(monkeypatch)
    type(arguments)._handle_piecewise_cuda_graph(arguments)
    assert arguments.disable_piecewise_cuda_graph is False, "SGLang itself leaves them on"
    assert handle(arguments) == [piecewise.OFF]
    assert arguments.disable_piecewise_cuda_graph is True
    assert handle(arguments) == []


def test_what_is_off_already_is_not_ours_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the flag that turns them off, or SGLang's own reason, then nothing is told."""
    assert handle(server_arguments(monkeypatch, disable_piecewise_cuda_graph=True)) == []
    assert handle(server_arguments(monkeypatch, pp_size=2)) == []


def test_enforced_piecewise_graphs_are_refused_with_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given --enforce-piecewise-cuda-graph, when layer 2 is on, then the command ends and says what to do."""
    arguments = server_arguments(monkeypatch, enforce_piecewise_cuda_graph=True)
    with pytest.raises(SystemExit, match=r"Drop the flag.*or set SGLANG_FL_OOT_ENABLED=0"):
        handle(arguments)


# ---- the gated delta rule ----

BINDER = Binder("cuda", True)
CHUNK = "chunk_gated_delta_rule"


def chunk(fn: Any, vendor: str = "my_chip") -> OpImpl:
    """A vendor's implementation."""
    return OpImpl(CHUNK, f"vendor.{vendor}", BackendImplKind.VENDOR, fn, vendor, 100)


def test_sglangs_functions_are_untouched_without_another_implementation(registry: OpRegistry) -> None:
    """Given no backend with such a function, then there is no hook and one line says so."""
    assert delta_rule.hooks(BINDER) == ([], [delta_rule.NOT_OFFERED])


def test_a_vendors_function_gets_sglangs_arguments_by_name(registry: OpRegistry) -> None:
    """Given a vendor's function, when SGLang calls its own, then the vendor's runs; scale is SGLang's default."""
    seen: dict[str, Any] = {}

    def vendor(**arguments: Any) -> str:
        seen.update(arguments)
        return "vendor"

    registry.register_impl(chunk(vendor))
    hooks, lines = delta_rule.hooks(Binder("cpu", False))
    assert [hook.target.rpartition(".")[2] for hook in hooks] == [CHUNK]
    assert lines == [f"{CHUNK} is vendor.my_chip"]
    assert misfits(hooks) == []
    key = torch.zeros(1, 2, 1, 16)
    assert hooks[0].function(never, key, key, key, None, None, head_first=True) == "vendor"
    assert (seen["scale"], seen["head_first"], seen["k"]) == (0.25, True, key)
    hooks[0].function(never, key, key, key, None, None, 0.5)
    assert seen["scale"] == 0.5


def test_all_three_hooks_have_sglangs_parameters(registry: OpRegistry) -> None:
    """Given implementations of all three, when hooked, then each hook fits the installed SGLang."""
    registry.register_many(
        [OpImpl(name, "vendor.x", BackendImplKind.VENDOR, never, "x") for name in delta_rule.FUNCTIONS]
    )
    hooks, _ = delta_rule.hooks(Binder("cpu", False))
    assert len(hooks) == 3
    assert misfits(hooks) == []


def test_sglangs_own_function_comes_first_where_it_is_preferred(registry: OpRegistry) -> None:
    """Given a vendor's function and SGLang's own kernels, when NVIDIA's is asked for, then SGLang's is not hooked."""
    registry.register_impl(chunk(never))
    set_manager(OpManager(registry, SelectionPolicy(per_op_order={CHUNK: ("vendor:nvidia",)})))
    hooks, lines = delta_rule.hooks(BINDER)
    assert hooks == []
    assert lines[0].startswith(f"{CHUNK} is vendor.nvidia (SGLang's own method)")


# ---- a process ----

SCRIPT = """
import sys
sys.argv[0] = "sglang"
import sglang_fl.plugin as plugin
plugin.load_plugin()
print("\\n".join(plugin._plugin.report_lines()))
print("MODULES", sorted(name for name in sys.modules if name.startswith("sglang.srt.layers.")
      and name.rpartition(".")[2] in ("activation", "layernorm", "topk", "unquant", "mrope")))
print("GEMS", "flag_gems" in sys.modules)
print("TARGETS", [hook.target.rpartition(".")[2] for hook in plugin._plugin.groups.hooks])
"""


def process(**variables: str) -> subprocess.CompletedProcess[str]:
    """A fresh process of a server's command that loads the plugin."""
    environment = {"PATH": "/usr/bin:/bin", "SGLANG_USE_CPU_ENGINE": "1", **variables}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)


def test_the_process_that_serves_http_imports_no_layer_for_us() -> None:
    """Given the plugin in the process of the command, then layer 2 is on, and no layer nor flag_gems is imported."""
    done = process()
    assert done.returncode == 0, done.stderr
    assert "layer 2, fused operators: on: order flagos, vendor, reference (from default)" in done.stdout
    assert "MODULES []" in done.stdout and "GEMS False" in done.stdout
    assert "dispatch_forward" in done.stdout


def test_switched_off_there_is_no_hook_on_operators_and_settings_say_so() -> None:
    """Given SGLANG_FL_OOT_ENABLED=0, then nothing of layer 2 is hooked, and its settings have no effect."""
    done = process(SGLANG_FL_OOT_ENABLED="0", SGLANG_FL_OOT_BLACKLIST="RMSNorm")
    assert done.returncode == 0, done.stderr
    assert "layer 2, fused operators: off: oot_enabled is off (from SGLANG_FL_OOT_ENABLED)" in done.stdout
    assert "no effect, layer 2, fused operators is off" in done.stdout
    assert "dispatch_forward" not in done.stdout and "_handle_piecewise_cuda_graph" not in done.stdout


def test_strict_and_an_absent_preference_end_the_command_with_one_message() -> None:
    """Given strict and flagos first without flag_gems, when the command loads the plugin, then it ends and says why."""
    done = process(SGLANG_FL_STRICT="1", SGLANG_FL_PER_OP="rms_norm=vendor:ascend|reference")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("sglang_fl: SGLANG_FL_STRICT is set: No available implementation for rms_norm: ")
    assert "Traceback" not in done.stderr
