"""Gives each of SGLang's groups its communicator, and compares all ranks once SGLang has made its groups."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from sglang_fl.comm import metrics
from sglang_fl.comm.agreement import Agreed, agree, compare
from sglang_fl.comm.audit import AuditWriter, HookClock, TimedTransport
from sglang_fl.comm.communicator import OPERATION_TIMEOUT_S, CommunicatorFL, group_context
from sglang_fl.comm.core import host_transport
from sglang_fl.comm.discovery import discover_backends
from sglang_fl.comm.errors import AgreementError
from sglang_fl.comm.exchange import Creation
from sglang_fl.comm.ledger import Ledger
from sglang_fl.comm.limits import checked_limit
from sglang_fl.comm.memory import in_words
from sglang_fl.comm.monitor import begin, creation
from sglang_fl.comm.policy import communicator_policy
from sglang_fl.comm.replays import GraphReplays
from sglang_fl.comm.sizes import add_routes, settings_to_agree_on
from sglang_fl.comm.types import GroupContext, Transport
from sglang_fl.config import CommMode, Settings
from sglang_fl.selection import Kind
from sglang_fl.sglang_hooks import graphs, shared_memory
from sglang_fl.sglang_hooks.native import NativeTransport
from sglang_fl.sglang_hooks.registration import Hook, HookKind, count_applied, dead, foreign
from sglang_fl.sglang_hooks.requests import Requests

logger = logging.getLogger("sglang_fl.comm")

PARALLEL_STATE = "sglang.srt.distributed.parallel_state"


class HookError(RuntimeError):
    """A hook that the plugin needs is not live; serving on would mean serving without the plugin."""


def _dist_timeout_s() -> float | None:
    """SGLang's ``--dist-timeout``, seconds; None where it was not given.

    Raises:
        ValueError: it is no time limit.
    """
    from sglang.srt.distributed import parallel_state

    given = parallel_state._MODEL_PARALLEL_GROUP_TIMEOUT
    return None if given is None else checked_limit("--dist-timeout", given.total_seconds())


@dataclass
class GroupRecord:
    """What became of one of SGLang's groups in this process."""

    name: str
    ranks: tuple[int, ...]
    choice: str
    reasons: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    communicator: CommunicatorFL | None = None

    def status(self) -> dict[str, Any]:
        """For the audit: the group, what carries it, and calls by method."""
        calls = {} if self.communicator is None else dict(self.communicator.counts)
        taken = 0 if self.communicator is None else self.communicator.extra_bytes
        return {
            "group": self.name,
            "ranks": list(self.ranks),
            "backend": self.choice if self.communicator is None else self.communicator.carried_by,
            "extra_bytes": taken,
            "calls": calls,
        }

    def line(self) -> str:
        """One line for the report."""
        return f"group {self.name} ranks {list(self.ranks)}: {'; '.join(self._words())}"

    def _words(self) -> tuple[str, ...]:
        size = 0 if self.communicator is None else self.communicator.extra_bytes
        taken = (f"{in_words(size)} of memory taken",) if size else ()
        return (self.choice, *taken, *self.routes, *self.reasons)


@dataclass
class Groups:
    """The plugin's view of SGLang's groups; one object a process, its methods are the hooks.

    Attributes:
        settings: this process's.
        versions: package to version, compared across ranks.
        native_kinds: kinds of backends for which SGLang's own methods are kept.
        hooks: every hook of the plugin; each must be live.
        operator_choices: what layer 2 would run each operator on here; None if it is off.
        rank: this process's global rank, kept beyond the groups' end.
    """

    settings: Settings
    versions: dict[str, str]
    native_kinds: frozenset[Kind]
    hooks: list[Hook] = field(default_factory=list)
    records: list[GroupRecord] = field(default_factory=list)
    operator_choices: Callable[[], dict[str, str]] | None = None
    rank: int = 0
    clock: HookClock | None = None
    ledger: Ledger | None = None
    audit: AuditWriter | None = None
    exporter: metrics.MetricsExporter | None = None

    def own_hooks(self) -> list[Hook]:
        """Hooks on the functions that make groups; none of them is on a path that serves requests."""
        return [
            Hook(f"{PARALLEL_STATE}.init_world_group", self._after_init_world_group, HookKind.AFTER),
            Hook(f"{PARALLEL_STATE}.init_model_parallel_group", self._after_init_group, HookKind.AFTER),
            Hook(f"{PARALLEL_STATE}.initialize_model_parallel", self._after_initialize, HookKind.AFTER),
        ]

    def failure_hooks(self, has_graphs: bool) -> list[Hook]:
        """Hooks that let the monitor see what SGLang does without a group's method, and that leave nothing behind."""
        found = shared_memory.hooks()
        if not self.settings.comm.record:
            return found
        found += Requests(self._watched_limit_s).hooks()
        return found + (graphs.hooks(GraphReplays(self._watched_limit_s)) if has_graphs else [])

    def _watched_limit_s(self) -> float:
        return self._operation_limit_s() or OPERATION_TIMEOUT_S

    def _after_init_world_group(
        self, result: Any, ranks: Any, local_rank: Any, backend: Any, recovered_rank: bool = False
    ) -> None:
        shared_memory.keep_bars_in_process()  # before the model is loaded
        self._attach(result, recovered_rank)

    def _after_init_group(
        self,
        result: Any,
        group_ranks: Any,
        local_rank: Any,
        backend: Any,
        use_pynccl: Any = None,
        use_custom_allreduce: Any = None,
        use_message_queue_broadcaster: bool = False,
        group_name: Any = None,
        use_mscclpp_allreduce: Any = None,
        use_torch_symm_mem_allreduce: Any = None,
        recovered_rank: bool = False,
    ) -> None:
        self._attach(result, recovered_rank)

    def _attach(self, coordinator: Any, recovered_rank: bool) -> None:
        ranks = tuple(coordinator.ranks)
        self.rank = torch.distributed.get_rank()
        record = GroupRecord(coordinator.unique_name, ranks, "")
        if self.ledger is not None:
            self.ledger.name_group(coordinator.unique_name, coordinator.device_group, coordinator.cpu_group)
        self.records.append(record)
        if len(ranks) == 1:
            record.choice = "one rank, nothing to communicate"
            return
        if recovered_rank:
            record.choice = "SGLang's own (a recovered rank's peers do not agree anew)"
            return
        made = Creation(coordinator.unique_name, ranks)
        with made.telling():
            self.require_live()
            context = group_context(
                coordinator.cpu_group,
                coordinator.device_group,
                coordinator.device,
                ranks,
                coordinator.unique_name,
                self.settings,
                self._limit_s(),
                self._operation_limit_s(),
            )
            # PD multiplexing duplicates the TP group in order to use both at the same time.
            shares = "pdmux" not in coordinator.unique_name
            context = begin(replace(context, shares_communicator=shares, creation=made))
            policy = communicator_policy(self.settings)
            also_equal = settings_to_agree_on(self.settings.comm)
            agreed = agree(context, discover_backends().backends, policy, self.native_kinds, also_equal)
            record.reasons = tuple(f"not {entry.impl_id}: {entry.reason}" for entry in agreed.passed_over)
            self._hang(coordinator, context, agreed, record)

    def _hang(self, coordinator: Any, context: GroupContext, agreed: Agreed, record: GroupRecord) -> None:
        if agreed.transport is None:
            record.choice = f"{agreed.backend.name} (SGLang's own methods)"
            return
        metadata: Transport = host_transport(context)
        if self.clock is None and metrics.are_on():
            self.clock = HookClock()
        if self.clock is not None:
            metadata = TimedTransport(metadata, f"{context.name} (metadata)", self.clock)
        routes: tuple[str, ...] = ()
        if self.settings.comm.mode is CommMode.FASTEST:
            coordinator.fl_native_threads = set()
            agreed, routes = add_routes(
                context,
                agreed,
                self.settings.comm.routes,
                discover_backends().backends,
                communicator_policy(self.settings),
                NativeTransport(coordinator, self.hooks),
                partial(self._timed, context.name),
            )
        elif agreed.transport is not None:
            agreed = replace(agreed, transport=self._timed(context.name, agreed.transport))
        record.communicator = CommunicatorFL.from_agreed(context, agreed, metadata, routes)
        record.choice = agreed.backend.name
        record.routes = routes
        coordinator.fl_communicator = record.communicator

    def _timed(self, group: str, transport: Transport) -> Transport:
        return transport if self.clock is None else TimedTransport(transport, group, self.clock)

    def _limit_s(self) -> float:
        """Seconds for a group's creation: ``comm.create_timeout_s``, or ``--dist-timeout`` where that is less."""
        own, given = self.settings.comm.create_timeout_s, _dist_timeout_s()
        return own if given is None else min(own, given)

    def _operation_limit_s(self) -> float | None:
        """Seconds for a call: ``comm.timeout_s``, or ``--dist-timeout`` where that is not set; None for the default."""
        own = self.settings.comm.timeout_s
        return _dist_timeout_s() if own is None else own

    def require_live(self) -> None:
        """Check by identity that every hook is live in this process.

        Raises:
            HookError: names each that is not, with the reason.
        """
        problems = dead(self.hooks)
        if problems:
            raise HookError(
                "sglang_fl: required hooks are not live: "
                + "; ".join(problems)
                + ". SGLang's log has the cause ('Failed to apply hooks'). "
                "SGLANG_PLUGINS=__none__ serves without the plugin."
            )

    def _after_initialize(
        self,
        result: Any,
        tensor_model_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        attention_data_parallel_size: int = 1,
        attention_context_model_parallel_size: int = 1,
        moe_data_model_parallel_size: int = 1,
        backend: Any = None,
        duplicate_tp_group: bool = False,
        enable_symm_mem: bool = False,
        recovered_rank: bool = False,
    ) -> None:
        self.require_live()
        ranks = self._compare_ranks()
        for record in self.records:
            logger.info("[sglang_fl] %s", record.line())
        logger.info("[sglang_fl] hooks live: %d of %d, checked by identity", len(self.hooks), len(self.hooks))
        for other in foreign(self.hooks):
            logger.warning("[sglang_fl] another plugin's hook: %s", other)
        logger.info(
            "[sglang_fl] settings, versions and choices are equal on %d rank(s), digest %s",
            ranks,
            self.settings.digest()[:12],
        )
        self._start_audit()
        if self.clock is not None and metrics.are_on() and self.exporter is None:
            self.exporter = metrics.MetricsExporter(self.clock, self.rank)

    def _start_audit(self) -> None:
        path = self.settings.comm.audit
        if path is None or self.audit is not None:
            return
        self.audit = AuditWriter(path, self.rank, self.status)
        self.audit.write()
        logger.info("[sglang_fl] audit of the groups' calls: %s", self.audit.path)

    def status(self) -> dict[str, Any]:
        """This process's groups with their calls, and the time in our hooks where it is counted."""
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "versions": self.versions,
            "hooks_live": count_applied(self.hooks),
            "hooks": len(self.hooks),
            "clock": None if self.clock is None else self.clock.status(),
            "groups": [record.status() for record in self.records],
            "calls": [] if self.ledger is None else self.ledger.rows(),
        }

    def _compare_ranks(self) -> int:
        from sglang.srt.distributed.parallel_state import get_world_group

        world = get_world_group()
        if world.world_size == 1:
            return 1
        context = group_context(
            world.cpu_group,
            world.device_group,
            world.device,
            world.ranks,
            world.unique_name,
            self.settings,
            self._limit_s(),
        )
        with creation(context) as begun:
            views = begun.exchange("compare settings", self._comparable())
            compare(views)
            self._compare_operators(begun)
        return len(views)

    def _compare_operators(self, context: GroupContext) -> None:
        """Ranks may have different chips, and so different implementations: told, and in strict mode an error."""
        own = {} if self.operator_choices is None else self.operator_choices()
        views = context.exchange("compare fused operators", own)
        try:
            compare([{f"the fused operator {name}": choice for name, choice in view.items()} for view in views])
        except AgreementError as error:
            if self.settings.ops.strict:
                raise
            if context.rank == 0:
                logger.warning("[sglang_fl] results may be rounded differently from rank to rank: %s", error)

    def _comparable(self) -> dict[str, str]:
        versions = {f"version of {name}": version for name, version in self.versions.items()}
        # Groups of one name exist once per set of ranks; only those of the same ranks must be alike.
        choices = {
            f"backend of {r.name} {list(r.ranks)}": "; ".join((r.choice, *r.routes))
            for r in self.records
            if r.communicator
        }
        return {**self.settings.comparable(), **versions, **choices}
