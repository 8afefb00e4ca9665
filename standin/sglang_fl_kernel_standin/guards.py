"""Tells imports that fall back on ImportError from those that do not, by reading the source of who imports.

SGLang imports the same name in both ways (``awq_dequantize`` guarded in one file, unguarded in another), so a
list of names cannot decide, and would be out of date with the next SGLang. The import statement itself can.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from types import CodeType, FrameType

_IMPORTLIB_FILES = frozenset({"<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"})
_CATCHING = frozenset({"ImportError", "Exception", "BaseException"})
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def is_guarded(frame: FrameType) -> bool:
    """Whether the line that ``frame`` executes is an import inside a ``try`` that catches ImportError.

    Code without a readable source (``python -c``) is unguarded. Only a ``try`` of the same function counts.
    """
    line = frame.f_lineno
    return any(first <= line <= last for first, last in _guarded_imports(frame.f_code.co_filename))


def importing_frame(frame: FrameType | None) -> FrameType | None:
    """The frame whose import statement importlib is carrying out: the first one outside importlib."""
    while frame is not None and frame.f_code.co_filename in _IMPORTLIB_FILES:
        frame = frame.f_back
    return frame


def is_importlib(code: CodeType) -> bool:
    """Whether the code belongs to the import system."""
    return code.co_filename in _IMPORTLIB_FILES


@functools.cache
def _guarded_imports(filename: str) -> tuple[tuple[int, int], ...]:
    """First and last line of each guarded import statement of a source file."""
    source = "".join(linecache.getlines(filename))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in _walk(tree, guarded=False))


def _walk(node: ast.AST, guarded: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        if guarded:
            yield node
        return
    inside = False if isinstance(node, _SCOPES) else guarded
    body = node.body if isinstance(node, ast.Try) and any(map(_catches, node.handlers)) else ()
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, inside or child in body)


def _catches(handler: ast.ExceptHandler) -> bool:
    """Whether a handler names ImportError or an ancestor of it, alone or in a tuple, or names nothing."""
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in _CATCHING for kind in kinds)
