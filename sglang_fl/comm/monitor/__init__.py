"""One thread a process that notices calls which cannot complete, says who is missing, and ends the waiting."""

from sglang_fl.comm.monitor.ending import EXIT_CODE
from sglang_fl.comm.monitor.group_watch import GroupWatch, begin, creation, watch_group
from sglang_fl.comm.monitor.monitor import MONITOR, Monitor

__all__ = ["EXIT_CODE", "MONITOR", "GroupWatch", "Monitor", "begin", "creation", "watch_group"]
