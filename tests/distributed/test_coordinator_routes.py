"""SGLang's own groups under mode fastest, and under Dynamo: what carries a call, and that values stay right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.coordinator_program import ask

LIMIT = 4096
ROUTES = f"all_reduce=native:{LIMIT}|flagcx;all_gather=torch:{LIMIT};reduce_scatter=flagcx:{LIMIT}|native"


@pytest.fixture(scope="module")
def answer(hostcx: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Groups on flagcx with routes by size, and functions traced in both modes, audited and not."""
    audit = tmp_path_factory.mktemp("audit") / "audit.json"
    base = {"FLAGCX_PATH": str(hostcx), "SGLANG_FL_COMM_AUDIT": str(audit)}
    fastest = {**base, "SGLANG_FL_COMM_MODE": "fastest", "SGLANG_FL_COMM_ROUTES": ROUTES}
    others = {"lenient": {}, "strict": {"SGLANG_FL_STRICT": "1", "SGLANG_FL_PREFER": "reference"}}
    return ask(
        {"by_size": {"fastest": fastest}, "traced": {"all": base, "fastest": fastest}, "other_operators": others}
    )


def test_each_size_takes_its_route(answer: dict[str, Any]) -> None:
    """Given routes for calls up to 4096 bytes, when 64 bytes and 16 KiB are summed and gathered, then each call is
    carried by its route, a dtype that a route cannot take by the group's backend, and SGLang's own methods do not
    come back to ours."""
    for rank in answer["by_size"]["fastest"]:
        # Per size: all_reduce and _all_reduce_in_place of float32, and all_reduce of int32, which native has not.
        assert rank["eager"]["all_reduce"] == {"native": 2, "flagcx": 4}
        # The larger tensor counts: 128 bytes, and 32 KiB.
        assert rank["eager"]["all_gather"] == {"torch": 1, "flagcx": 1}
        assert rank["eager"]["reduce_scatter"] == {"flagcx": 1, "native": 1}
        assert f"all_reduce by size: native:{LIMIT}|flagcx|else flagcx" in rank["routes"]


@pytest.mark.parametrize("mode", ["all", "fastest"])
def test_dynamo_traces_the_groups(mode: str, answer: dict[str, Any]) -> None:
    """Given a function with collectives, when Dynamo must trace it whole, then it gives what it gives eagerly, its
    argument stays as it is, and the calls are carried by the group's routes."""
    for rank in answer["traced"][mode]:
        assert rank["traced"] == rank["eager"]
        assert rank["kept"]
        for operation in ("all_reduce", "all_gather", "reduce_scatter"):
            eager, before, after = (rank[name][operation] for name in ("eager calls", "before", "after"))
            assert {name: before[name] + calls for name, calls in eager.items()} == after, operation


def test_ranks_with_other_fused_operators(answer: dict[str, Any]) -> None:
    """Given ranks on which an operator has different implementations, as on different chips, then rank 0 warns with
    operator, implementations and ranks; in strict mode all ranks end with the same."""
    told = "the fused operator rms_norm is 'flagos' on rank(s) [0], 'reference' on rank(s) [1]"
    first, second = answer["other_operators"]["lenient"]
    assert not first["error"] and len(first["warnings"]) == 1 and told in first["warnings"][0]
    assert second == {"error": "", "warnings": []}
    strict = answer["other_operators"]["strict"]
    assert strict[0]["error"] == strict[1]["error"] and told in strict[0]["error"]
