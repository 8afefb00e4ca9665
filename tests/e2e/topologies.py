"""The sizes at which servers are compared with SGLang's own, and what each forward must carry at least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_fl.testing.server import Environment, Server
from sglang_fl.testing.tiny_model import DEFAULT_PROMPTS, DEFAULT_QUESTION, GREEDY_TOKENS, Family

CONTROL: Environment = {"SGLANG_PLUGINS": "__none__"}

# At least this many calls of each rank in every forward; one entry per stage of the pipeline. The embedding, attention
# and MLP of two layers reduce, the logits gather. With two stages and one layer each, tensors travel on and results
# back. With DP attention only the MLPs and the embedding are shared, and their tokens are gathered before.
Calls = Mapping[str, int]
TENSOR_PARALLEL: Calls = {"all_reduce": 5, "all_gather": 1}
STAGES: tuple[Calls, Calls] = (
    {"send_tensor_dict": 2, "recv_tensor_dict": 1},
    {"send_tensor_dict": 1, "recv_tensor_dict": 2},
)
DATA_PARALLEL_ATTENTION: Calls = {"all_reduce": 3, "all_gather_into_tensor": 2, "all_gather": 1}


@dataclass(frozen=True)
class Topology:
    """One set of sizes.

    Attributes:
        name: also the tests' id.
        calls: per stage of the pipeline, the least number of calls of each rank in one forward.
        control: the topology of the server without the plugin whose tokens must come out.
    """

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1
    family: Family = Family.QWEN2
    arguments: tuple[str, ...] = ()
    calls: tuple[Calls, ...] = field(default=({},))
    control: Topology | None = None

    def server(self, models: Mapping[Family, Path], folder: Path, environment: Environment) -> Server:
        """Not started yet. float32, because bfloat16 leaves ties between tokens, which rounding would decide."""
        return Server(
            models[self.family],
            folder,
            arguments=("--dtype=float32", *self.arguments),
            environment=environment,
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            nodes=self.nodes,
        )

    def calls_of(self, rank: int) -> Calls:
        """What a global rank must call in every forward."""
        return self.calls[rank // self.tp]


@dataclass(frozen=True)
class Answers:
    """What a server said: greedy tokens of each prompt, alone and in one batch, and the answer of the chat."""

    alone: tuple[tuple[int, ...], ...]
    batched: tuple[tuple[int, ...], ...]
    chat: str


def ask(server: Server) -> Answers:
    """The same questions to every server."""
    sampling = {"temperature": 0, "max_new_tokens": GREEDY_TOKENS, "ignore_eos": True}
    alone = tuple(tuple(server.generate(prompt, GREEDY_TOKENS)) for prompt in DEFAULT_PROMPTS[:2])
    batch = server.post("/generate", {"text": list(DEFAULT_PROMPTS), "sampling_params": sampling})
    return Answers(alone, tuple(tuple(reply["output_ids"]) for reply in batch), server.chat(DEFAULT_QUESTION, 16))


def difference(after: Counter[str], before: Counter[str]) -> Counter[str]:
    """Calls by method between two reports."""
    return Counter({method: count - before[method] for method, count in after.items()})


ONE = Topology("tp1")
TP = Topology("tp2", tp=2, calls=(TENSOR_PARALLEL,))
PP = Topology("pp2", pp=2, calls=STAGES)
TP_PP = Topology(
    "tp2-pp2",
    tp=2,
    pp=2,
    calls=({**STAGES[0], "all_reduce": 3}, {**STAGES[1], "all_reduce": 2, "all_gather": 1}),
)
QWEN3 = Topology("tp1-qwen3", family=Family.QWEN3)
QWEN3_MOE_TP = Topology("tp2-qwen3-moe", tp=2, family=Family.QWEN3_MOE)
# SGLang alone cannot run DP attention on a CPU: the same model in one process is the control.
DP_ATTENTION = Topology(
    "tp2-dp2-attention",
    tp=2,
    dp=2,
    family=Family.QWEN3,
    arguments=("--enable-dp-attention",),
    calls=(DATA_PARALLEL_ATTENTION,),
    control=QWEN3,
)
TWO_NODES = Topology("tp2-two-nodes", tp=2, nodes=2, calls=(TENSOR_PARALLEL,), control=TP)
ALL = (ONE, TP, PP, TP_PP, DP_ATTENTION, TWO_NODES)
