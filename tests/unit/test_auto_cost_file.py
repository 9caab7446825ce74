"""A damaged cost file is refused, whatever is in it; it never ends a process."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_mtp.auto.costs import CostCacheError, CostTable
from vllm_mtp.auto.ladder import Rung

KEY = "key"
GOOD = CostTable(
    batches=(1, 8), contexts=(64, 1024), times=((((1.0, 2.0)), (2.0, 3.0)),) * 2
)


@pytest.fixture
def ladder() -> list[Rung]:
    return [Rung(num_nodes=1, num_steps=1), Rung(num_nodes=3, num_steps=2)]


def changed(ladder: list[Rung], **fields: Any) -> str:
    return json.dumps(json.loads(GOOD.to_json(KEY, ladder)) | fields)


def test_a_good_file_is_read_back(ladder: list[Rung]) -> None:
    assert CostTable.from_json(GOOD.to_json(KEY, ladder), KEY, ladder) == GOOD


DAMAGE: dict[str, Any] = {
    "no axes": {"batches": [], "contexts": [], "times_ms": [[], []]},
    "no batches": {"batches": [], "times_ms": [[[], []], [[], []]]},
    "batch twice": {"batches": [8, 8]},
    "contexts falling": {"contexts": [1024, 64]},
    "batch 0": {"batches": [0, 8]},
    "batch infinite": {"batches": [1, float("inf")]},
    "time infinite": {"times_ms": [[[1, float("inf")], [1, 2]]] * 2},
    "time nan": {"times_ms": [[[1, float("nan")], [1, 2]]] * 2},
    "time too large": {"times_ms": [[[1, 10**400], [1, 2]]] * 2},
    "time negative": {"times_ms": [[[1, -2], [1, 2]]] * 2},
    "row missing": {"times_ms": [[[1, 2]]] * 2},
    "rung missing": {"times_ms": [[[1, 2], [1, 2]]]},
    "text for numbers": {"batches": "ab"},
    "null": {"times_ms": None},
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_numbers(name: str, ladder: list[Rung]) -> None:
    """Catches: a division by zero, or an index out of range, when serving starts."""
    with pytest.raises(CostCacheError):
        CostTable.from_json(changed(ladder, **DAMAGE[name]), KEY, ladder)


@pytest.mark.parametrize(
    "text", ["", "[]", "7", '"x"', "{", "{}", "[" * 100_000, "\x00", "1" * 5000]
)
def test_no_cost_file_at_all(text: str, ladder: list[Rung]) -> None:
    with pytest.raises(CostCacheError):
        CostTable.from_json(text, KEY, ladder)


def test_files_that_cannot_be_read(tmp_path: Path, ladder: list[Rung]) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "missing", binary):
        with pytest.raises(CostCacheError):
            CostTable.load(path, KEY, ladder)
