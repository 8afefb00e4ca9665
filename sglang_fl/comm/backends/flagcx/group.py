"""Group: calls between start and end progress together; the end always comes, the first error is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

from sglang_fl.comm.backends.flagcx.types import FlagCXOperation
from sglang_fl.comm.errors import CommError

logger = logging.getLogger(__name__)


class Group:
    """A context manager of one thread; groups may be nested, only the outermost end starts the work.

    Raises:
        CommError: from the start, or from the end unless the body raised first; then the end's error is logged.
    """

    __slots__ = ("_end", "_handle", "_settle", "_start")

    def __init__(
        self,
        start: Callable[[Any], int],
        end: Callable[[Any], int],
        handle: Any,
        settle: Callable[[int, FlagCXOperation], None],
    ) -> None:
        """``settle`` raises for a result that is not 0 and is a failure."""
        self._start = start
        self._end = end
        self._handle = handle
        self._settle = settle

    def __enter__(self) -> None:
        code = self._start(self._handle)
        if code:
            self._settle(code, FlagCXOperation.GROUP_START)

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = self._end(self._handle)
        if not code:
            return
        try:
            self._settle(code, FlagCXOperation.GROUP_END)
        except CommError as error:
            if raised is None:
                raise
            logger.warning("after %r the end of the group failed too: %s", raised, error)
