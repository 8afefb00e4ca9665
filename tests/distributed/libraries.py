"""Variants of hostcx for tests: with symbols missing, or with answers of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

SUCCESS, INVALID_ARGUMENT, NOT_SUPPORTED = 0, 4, 9  # flagcx.h

_ANSWER = """
long {name}(long a, long b, long c, long d, long e, long f, long g, long h) {{
    static int calls;
    if (calls++ >= {after}) return {code};
    long (*real)(long, long, long, long, long, long, long, long) = dlsym(RTLD_NEXT, "{name}");
    return real(a, b, c, d, e, f, g, h);
}}
"""


@dataclass(frozen=True)
class Answer:
    """A result that a function gives instead of working, after ``after`` calls that work."""

    code: int
    after: int = 0


def without(hostcx: Path, output: Path, symbols: Collection[str]) -> Path:
    """hostcx linked anew without those functions; the library file, as FLAGCX_PATH takes it."""
    output.mkdir(parents=True, exist_ok=True)
    script, library = output / "hidden.map", output / "libflagcx.so"
    script.write_text("{ global: flagcx*; local: " + "".join(f"{symbol}; " for symbol in symbols) + "};\n")
    objects = sorted((hostcx / "objects").glob("*.o"))
    _compile([f"-Wl,--version-script={script}", "-o", str(library), *map(str, objects)])
    return library


def answering(hostcx: Path, output: Path, answers: Mapping[str, Answer]) -> Path:
    """A library that is hostcx but for some functions, which give an answer of their own."""
    output.mkdir(parents=True, exist_ok=True)
    source, library, real = output / "answers.c", output / "libflagcx.so", hostcx / "lib/libflagcx.so"
    functions = [_ANSWER.format(name=name, code=answer.code, after=answer.after) for name, answer in answers.items()]
    source.write_text("#define _GNU_SOURCE\n#include <dlfcn.h>\n" + "".join(functions))
    _compile(
        ["-fPIC", "-o", str(library), str(source), "-Wl,--no-as-needed", str(real), f"-Wl,-rpath,{real.parent}", "-ldl"]
    )
    return library


def _compile(arguments: list[str]) -> None:
    subprocess.run(["cc", "-shared", "-pthread", *arguments], check=True, capture_output=True)
