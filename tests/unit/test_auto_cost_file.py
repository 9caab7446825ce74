"""A damaged cost file is refused, whatever is in it; it never ends a process."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mtp.auto import profile
from vllm_mtp.auto.costs import CostCacheError, CostTable
from vllm_mtp.auto.ladder import Rung
from vllm_mtp.config import SETTINGS_KEY, MTPConfig

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


def test_a_folder_that_cannot_be_looked_into(
    ladder: list[Rung], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a worker that dies of it, while the others wait for its answer."""
    # A name too long fails for root too, where permissions do not.
    monkeypatch.setattr(profile, "cost_path", lambda key: Path("x" * 300, key))
    monkeypatch.setattr(profile, "cost_key", lambda config: KEY)
    monkeypatch.setattr(profile, "measure", lambda *args: GOOD)
    profile.load_or_measure(
        None, ladder, lambda *step: None, True, lambda answer: answer
    )


def make_config(adapters: Any = None, **limits: int) -> SimpleNamespace:
    """What ``cost_key`` reads of a ``VllmConfig``."""
    limits = {"rows": 2048, "length": 4096, **limits}
    return SimpleNamespace(
        lora_config=adapters,
        model_config=SimpleNamespace(
            model="m",
            revision=None,
            dtype="bfloat16",
            quantization=None,
            hf_text_config=SimpleNamespace(to_dict=dict),
            enforce_eager=False,
            max_model_len=limits["length"],
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, enable_expert_parallel=False
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        scheduler_config=SimpleNamespace(
            max_num_seqs=8, max_num_batched_tokens=limits["rows"]
        ),
        compilation_config=SimpleNamespace(mode=3),
        attention_config=SimpleNamespace(backend=None),
        additional_config={SETTINGS_KEY: MTPConfig(auto=True).to_dict()},
    )


def test_a_table_that_ends_elsewhere_is_another_file() -> None:
    """Catches: long contexts served by a table that was measured for short ones."""
    key = profile.cost_key(make_config())
    assert profile.cost_key(make_config()) == key
    assert profile.cost_key(make_config(length=131072)) != key
    assert profile.cost_key(make_config(rows=8192)) != key
    assert profile.cost_key(make_config(adapters=object())) != key
