"""The stand-in for sgl_kernel: what imports, what does not, what a call says, and how it lives beside a real one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
INSTALL = REPOSITORY / "standin" / "install.py"
STAND_IN = "sglang-fl-kernel-standin"
MARKED = "import sgl_kernel; print(sgl_kernel.__sglang_fl_standin__, repr(sgl_kernel))"


class Environment:
    """A virtual environment of its own, with this environment's pip and setuptools and nothing else."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        self.folder = folder
        self.site_packages = Path(
            self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        )
        ours = Path(sysconfig.get_path("purelib"))
        for pattern in ("pip", "pip-*.dist-info", "setuptools", "setuptools-*.dist-info", "_distutils_hack"):
            for tool in ours.glob(pattern):
                (self.site_packages / tool.name).symlink_to(tool)

    def run(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python, away from the repository."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
        command = [str(self.python), *map(str, arguments)]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, cwd=self.folder, env=environment, timeout=120
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def pip(self, *arguments: str | Path) -> None:
        self.run("-m", "pip", "--disable-pip-version-check", *arguments)


@pytest.fixture
def empty(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.fixture(scope="module")
def equipped(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment into which install.py has put the stand-in; tests do not change it."""
    environment = Environment(tmp_path_factory.mktemp("equipped") / "environment")
    done = environment.run(INSTALL)
    assert f"no real sgl_kernel is installed for {environment.python}: installing {STAND_IN}" in done.stdout
    assert f"installed {STAND_IN}" in done.stdout
    return environment


def _wheel_of_a_real_kernel(folder: Path) -> Path:
    """Takes the place of the vendor's wheel, which cannot be imported without its driver: same names, one kernel."""
    wheel = folder / "sglang_kernel-0.4.2-py3-none-any.whl"
    info = "sglang_kernel-0.4.2.dist-info"
    files = {
        "sgl_kernel/__init__.py": "def rmsnorm():\n    return 'real'\n",
        "sgl_kernel/kvcacheio.py": "def transfer_kv_all_layer():\n    return 'real'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: sglang-kernel\nVersion: 0.4.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))
    return wheel


def test_every_kind_of_process_finds_the_marked_stand_in(equipped: Environment, tmp_path: Path) -> None:
    """Given the stand-in, then -c, -m, a script, isolated mode and a spawned child all import it, with its marker."""
    (equipped.folder / "as_module.py").write_text(MARKED)
    spawning = tmp_path / "spawning.py"
    spawning.write_text(
        dedent(f"""
            import multiprocessing
            def child():
                {MARKED}
            if __name__ == "__main__":
                process = multiprocessing.get_context("spawn").Process(target=child)
                process.start()
                process.join()
        """)
    )

    outputs = [
        equipped.run(*arguments).stdout
        for arguments in (["-c", MARKED], ["-m", "as_module"], [spawning], ["-I", "-c", MARKED])
    ]

    assert outputs == ["True <module 'sgl_kernel' (stand-in by sglang_fl, holds no kernels)>\n"] * 4


def test_start_of_python_loads_only_the_finder(equipped: Environment) -> None:
    """Given the stand-in, when Python starts, then nothing is loaded beyond the finder, which stands last."""
    program = """
        import sys
        print([name for name in sys.modules if name.startswith(("sgl_kernel", "sglang_fl")) or name == "ast"])
        print(sys.meta_path[-1].__name__)
    """
    assert equipped.run("-c", dedent(program)).stdout == "['sglang_fl_kernel_standin']\nStandInFinder\n"


def test_a_call_names_the_kernel_and_says_what_to_install(equipped: Environment) -> None:
    """Given kernels imported in each way that SGLang has, when called, then the error names kernel and remedy."""
    program = """
        import sgl_kernel
        from sgl_kernel import rmsnorm, spatial
        from sgl_kernel.kvcacheio import transfer_kv_direct as renamed
        from sgl_kernel.scalar_type import scalar_types
        import sgl_kernel.elementwise as elementwise

        calls = {
            "sgl_kernel.rmsnorm": lambda: rmsnorm(1, eps=2),
            "sgl_kernel.spatial.get_sm_available": lambda: spatial.get_sm_available(0),
            "sgl_kernel.kvcacheio.transfer_kv_direct": lambda: renamed(),
            "sgl_kernel.scalar_type.scalar_types.uint4b8.size": lambda: scalar_types.uint4b8.size(),
            "sgl_kernel.topk_softmax": lambda: sgl_kernel.topk_softmax(),
            "sgl_kernel.elementwise.copy_to_gpu_no_ce": lambda: elementwise.copy_to_gpu_no_ce(),
        }
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:
                assert str(error).startswith(f"{name} is not available"), error
                assert 'pip install --no-deps "sglang-kernel' in str(error), error
            else:
                raise SystemExit(f"{name} did not raise")
    """
    equipped.run("-c", dedent(program))


def test_operators_that_sglang_describes_to_dynamo_on_cuda(equipped: Environment) -> None:
    """Given torch, when the stand-in is imported, then the operators that SGLang registers fakes for where it finds a
    CUDA device are there, each registers, and to call one is the error of any kernel."""
    program = f"""
        import sys
        sys.path.append({str(Path(torch.__file__).parents[1])!r})
        import torch, sgl_kernel
        torch.library.register_fake("sgl_kernel::moe_fused_gate")(lambda input, bias, *rest, **named: (input, bias))
        try:
            torch.ops.sgl_kernel.moe_fused_gate(torch.ones(1, 2), torch.ones(2), 1, 1, 1)
        except RuntimeError as error:
            assert str(error).startswith("sgl_kernel.moe_fused_gate is not available"), error
        else:
            raise SystemExit("it did not raise")
    """
    equipped.run("-c", dedent(program))


# Who imports FlashInfer: SGLang on every CUDA device, SGLang where it has a way out, and somebody else.
_IMPORTERS = {
    "sglang/__init__.py": "",
    "sglang/sampler.py": "from flashinfer.sampling import min_p_sampling_from_probs\n",
    "sglang/norm.py": (
        "try:\n    from flashinfer.norm import layernorm\nexcept ImportError:\n    layernorm = None\n"
        "try:\n    from flashinfer import fp4_quantize\nexcept ImportError:\n    fp4_quantize = None\n"
    ),
    "somebody.py": "import flashinfer.norm\n",
}


def _importers(folder: Path) -> Path:
    for name, source in _IMPORTERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    return folder


def test_flashinfer_is_there_for_the_imports_of_sglang_that_have_no_way_out(
    equipped: Environment, tmp_path: Path
) -> None:
    """Given no FlashInfer, then SGLang's unguarded import works, every question for FlashInfer hears no, before and
    after it, and a call names the function and the options that avoid it."""
    program = f"""
        import importlib.util, os, sys
        sys.path.insert(0, {str(_importers(tmp_path))!r})

        def answers():
            import sglang.norm
            found = [sglang.norm.layernorm, sglang.norm.fp4_quantize]
            for name in ("sglang.norm", "somebody"):
                sys.modules.pop(name, None)
            try:
                import somebody
            except ImportError as error:
                found.append(type(error).__name__)
            return found

        print(importlib.util.find_spec("flashinfer"), *answers())
        import sglang.sampler
        print(os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"], *answers())
        try:
            sglang.sampler.min_p_sampling_from_probs(1)
        except RuntimeError as error:
            print(error)
    """
    before, after, call = equipped.run("-c", dedent(program)).stdout.splitlines()
    assert before == "None None None ModuleNotFoundError"
    assert after == "false None None ModuleNotFoundError"
    assert call.startswith(
        "flashinfer.sampling.min_p_sampling_from_probs is not available: FlashInfer is not installed"
    )
    assert call.endswith("--attention-backend triton --sampling-backend pytorch.")


def test_a_real_flashinfer_wins(equipped: Environment, tmp_path: Path) -> None:
    """Given FlashInfer and the stand-in, when SGLang imports it, then it is FlashInfer, and the switch stays unset."""
    package = _importers(tmp_path) / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sampling.py").write_text("def min_p_sampling_from_probs():\n    return 'real'\n")
    program = f"""
        import os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import sglang.sampler
        print(sglang.sampler.min_p_sampling_from_probs(), os.environ.get("SGLANG_IS_FLASHINFER_AVAILABLE"))
    """
    assert equipped.run("-c", dedent(program)).stdout == "real None\n"


def test_a_question_for_a_kernel_is_answered_with_no(equipped: Environment) -> None:
    """Given the stand-in, when code asks by hasattr or getattr, then no kernel is there and no submodule appears."""
    program = """
        import sgl_kernel, sys
        assert not hasattr(sgl_kernel, "rmsnorm")
        assert getattr(sgl_kernel, "rmsnorm", None) is None
        assert not hasattr(sgl_kernel, "__version__") and not hasattr(sgl_kernel, "__file__")
        from sgl_kernel import rmsnorm
        assert not hasattr(sgl_kernel, "rmsnorm")
        assert rmsnorm.__sglang_fl_standin__ and "stand-in" in repr(rmsnorm)
        assert [name for name in sys.modules if name.startswith("sgl_kernel")] == ["sgl_kernel"]
    """
    equipped.run("-c", dedent(program))


IMPORTS = {
    "unguarded": ("from sgl_kernel import a", False),
    "unguarded submodule": ("from sgl_kernel.part import a, b", False),
    "ImportError": ("try:\n    from sgl_kernel import a\nexcept ImportError:\n    raise", True),
    "tuple": ("try:\n    from sgl_kernel import a\nexcept (ImportError, OSError):\n    raise", True),
    "Exception": ("try:\n    from sgl_kernel import a\nexcept Exception:\n    raise", True),
    "bare": ("try:\n    from sgl_kernel import a\nexcept:\n    raise", True),
    "second handler": (
        "try:\n    from sgl_kernel import a\nexcept KeyError:\n    raise\nexcept ImportError:\n    raise",
        True,
    ),
    "several lines": (
        "try:\n    from sgl_kernel import (\n        a,\n        b,\n    )\nexcept ImportError:\n    raise",
        True,
    ),
    "deeper": ("try:\n    if True:\n        from sgl_kernel import a\nexcept ImportError:\n    raise", True),
    "submodule": ("try:\n    import sgl_kernel.part\nexcept ImportError:\n    raise", True),
    "submodule renamed": ("try:\n    import sgl_kernel.part as p\nexcept ImportError:\n    raise", True),
    "from submodule": ("try:\n    from sgl_kernel.part import a\nexcept ImportError:\n    raise", True),
    "in a function": (
        "def f():\n    try:\n        from sgl_kernel import a\n    except ImportError:\n        raise\nf()",
        True,
    ),
    "another error": ("try:\n    from sgl_kernel import a\nexcept KeyError:\n    raise", False),
    "finally only": ("try:\n    from sgl_kernel import a\nfinally:\n    pass", False),
    "in the handler": ("try:\n    1 / 0\nexcept Exception:\n    from sgl_kernel import a", False),
    "in else": ("try:\n    pass\nexcept ImportError:\n    raise\nelse:\n    from sgl_kernel import a", False),
    "in a function called in try": (
        "def f():\n    from sgl_kernel import a\ntry:\n    f()\nexcept ImportError:\n    raise",
        False,
    ),
    "in a function defined in try": (
        "try:\n    def f():\n        from sgl_kernel import a\nexcept ImportError:\n    raise\nf()",
        False,
    ),
    "both for one name": (
        "from sgl_kernel import a\ntry:\n    from sgl_kernel import a\nexcept ImportError:\n    raise",
        True,
    ),
    "package alone": ("try:\n    import sgl_kernel\nexcept ImportError:\n    raise", False),
}


@pytest.mark.parametrize(("source", "raises"), IMPORTS.values(), ids=IMPORTS)
def test_only_imports_guarded_against_import_error_raise(
    source: str, raises: bool, equipped: Environment, tmp_path: Path
) -> None:
    """Given an import in some surroundings, then ImportError is raised exactly if those surroundings catch it."""
    script = tmp_path / "imports.py"
    script.write_text(source)

    done = equipped.run(script, check=False)

    assert (done.returncode, "ImportError" in done.stderr or "ModuleNotFoundError" in done.stderr) == (
        (1, True) if raises else (0, False)
    ), done.stderr


# Runs in the equipped environment: carries out each import of sgl_kernel in SGLang's source, at its own file and
# line, and reports what happened beside what Python itself says of the handlers around it.
SITES_PROGRAM = '''
import ast, builtins, json, sys
from pathlib import Path

def catches_import_error(handlers):
    """By trial: raise ImportError under these handlers and see whether they let it through."""
    if not handlers:
        return False
    trial = ast.parse("try:\\n    raise ImportError\\nexcept KeyError:\\n    pass")
    trial.body[0].handlers = [ast.ExceptHandler(handler.type, None, [ast.Pass()]) for handler in handlers]
    try:
        exec(compile(ast.fix_missing_locations(trial), "trial", "exec"), {})
    except ImportError:
        return False
    except NameError:  # a handler that names a class of its own module: not ImportError
        return False
    return True

def sites(node, guarded=False):
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if any(name.partition(".")[0] == "sgl_kernel" for name in names):
            yield node, guarded
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        guarded = False
    for field, value in ast.iter_fields(node):
        inside = guarded
        if isinstance(node, ast.Try) and field == "body":
            inside = guarded or catches_import_error(node.handlers)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from sites(child, inside)

def outcome(node, file):
    try:
        exec(compile(ast.Module([node], []), str(file), "exec"), {})
    except ImportError:
        return "raises"
    return "works"

found = []
root = Path(sys.argv[1])
for file in sorted(root.rglob("*.py")):
    text = file.read_text(encoding="utf-8")
    if "sgl_kernel" in text:
        for node, guarded in sites(ast.parse(text)):
            found.append([f"{file.relative_to(root)}:{node.lineno}", ast.unparse(node), guarded, outcome(node, file)])
print(json.dumps(found))
'''


def test_every_import_of_the_installed_sglang_has_the_right_outcome(equipped: Environment, tmp_path: Path) -> None:
    """Given each import of sgl_kernel in SGLang's source, then it raises exactly where SGLang has a fallback."""
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None
    assert sglang.submodule_search_locations
    script = tmp_path / "sites.py"
    script.write_text(SITES_PROGRAM)

    found = json.loads(equipped.run(script, sglang.submodule_search_locations[0]).stdout)

    # `import sgl_kernel` alone always works, and answers what is asked of it next (torch.ops, hasattr) with no.
    expected = {
        place: "raises" if guarded and statement != "import sgl_kernel" else "works"
        for place, statement, guarded, _ in found
    }
    outcomes = {place: outcome for place, _, _, outcome in found}
    wrong = {place: outcomes[place] for place in outcomes if outcomes[place] != expected[place]}
    assert wrong == {}
    kinds = list(expected.values())
    print(f"{kinds.count('raises')} imports raise, {kinds.count('works')} work")
    assert kinds.count("raises") >= 10  # the search itself found what SGLang 0.5.11 holds
    assert kinds.count("works") >= 80


def test_a_real_kernel_installed_later_wins_and_keeps_its_files(empty: Environment, tmp_path: Path) -> None:
    """Given the stand-in, when a real one comes and goes in either order, then neither touches the other."""
    wheel = _wheel_of_a_real_kernel(tmp_path)
    is_real = "import sgl_kernel; print(sgl_kernel.rmsnorm(), hasattr(sgl_kernel, '__sglang_fl_standin__'))"
    missing = "import sgl_kernel.no_such_part"

    empty.run(INSTALL)
    empty.pip("install", "--no-deps", "--no-index", wheel)
    assert empty.run("-c", is_real).stdout == "real False\n"
    assert "No module named 'sgl_kernel.no_such_part'" in empty.run("-c", missing, check=False).stderr

    both = empty.run(INSTALL)
    assert "sglang-kernel 0.4.2 is installed and in use" in both.stdout
    assert f"pip uninstall {STAND_IN}" in both.stdout

    empty.pip("uninstall", "--yes", "sglang-kernel")
    assert empty.run("-c", MARKED).stdout.startswith("True ")

    empty.pip("install", "--no-deps", "--no-index", wheel)
    empty.pip("uninstall", "--yes", STAND_IN)
    assert empty.run("-c", is_real).stdout == "real False\n"
    assert not list(empty.site_packages.glob("*standin*"))
    alone = empty.run(INSTALL)
    assert alone.stdout == "sglang-kernel 0.4.2 is installed; the stand-in is not needed\n"
    assert not list(empty.site_packages.glob("*standin*"))


def _break_file(environment: Environment) -> None:
    (environment.site_packages / "sgl_kernel" / "kvcacheio.py").unlink()


def _leave_folder(environment: Environment) -> None:
    environment.pip("uninstall", "--yes", "sglang-kernel")
    (environment.site_packages / "sgl_kernel").mkdir()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_break_file, "damaged: 1 of its files are gone, the first is sgl_kernel/kvcacheio.py"),
        (_leave_folder, "remove that folder and run this again"),
    ],
)
def test_damage_is_told_and_fails(damage: object, complaint: str, empty: Environment, tmp_path: Path) -> None:
    """Given a real one with a file gone, or the empty folder of one, then install.py says so and fails."""
    assert callable(damage)
    empty.pip("install", "--no-deps", "--no-index", _wheel_of_a_real_kernel(tmp_path))
    damage(empty)

    done = empty.run(INSTALL, check=False)

    assert done.returncode == 1
    assert complaint in done.stderr
    assert not list(empty.site_packages.glob("*standin*"))


def test_somebodys_own_build_is_left_alone(empty: Environment) -> None:
    """Given a sgl_kernel that no known distribution brought, then nothing is installed and its place is named."""
    package = empty.site_packages / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("")

    done = empty.run(INSTALL)

    assert done.stdout == f"sgl_kernel is there already, from {package / '__init__.py'}; the stand-in is not needed\n"


def test_installing_leaves_the_source_folder_as_it_was(empty: Environment, tmp_path: Path) -> None:
    """Given a copy of the source folder, when installed twice, then no build product stays in it."""
    copy = shutil.copytree(
        INSTALL.parent, tmp_path / "standin", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    )

    def files() -> Iterator[str]:
        return (str(path.relative_to(copy)) for path in copy.rglob("*") if "__pycache__" not in path.parts)

    before = sorted(files())
    empty.run(copy / "install.py")
    empty.run(copy / "install.py")

    assert sorted(files()) == before
    assert empty.run("-c", MARKED).stdout.startswith("True ")
