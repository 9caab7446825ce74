"""bfloat16: ids equal no speculation up to ties, on the CPU and on GPUs."""

from typing import Any

import pytest

from tests.conftest import GPUS
from tests.e2e.test_ids import SHAPES, mtp_tree, sampling
from tests.helpers.engine import counters, engine, generate
from tests.helpers.margin import unequal_beyond_ties
from tests.helpers.prompts import held_out

LENGTHS = (1, 2, 3, 7, 8, 9, 33, 120)
COUNT = 16 if GPUS else 4
TOKENS = 96 if GPUS else 48
SETTINGS: dict[str, Any] = {"dtype": "bfloat16"}
if GPUS:
    # Graphs, chunked prefill and prefix caching as vLLM sets them by default.
    SETTINGS |= {
        "attention_backend": None,
        "enforce_eager": False,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": 1 << 30,
    }
RUNS = SHAPES if GPUS else [(3, 4, 7)]


@pytest.fixture(scope="module")
def found() -> dict[Any, list[list[int]]]:
    outputs: dict[Any, list[list[int]]] = {}
    for shape in RUNS:
        with engine(mtp_tree(*shape), **SETTINGS) as llm:
            params = sampling(COUNT, (0.0,), TOKENS)
            outputs[shape] = generate(llm, held_out(COUNT, LENGTHS), params)
            assert counters(llm)["num_accepted_tokens"] > COUNT
    return outputs


def test_every_difference_is_a_tie(found: dict[Any, list[list[int]]]) -> None:
    prompts = held_out(COUNT, LENGTHS)
    with engine(**SETTINGS) as llm:
        reference = generate(llm, prompts, sampling(COUNT, (0.0,), TOKENS))
        faults = {
            shape: unequal_beyond_ties(llm, prompts, reference, ids)
            for shape, ids in found.items()
        }
    assert not any(faults.values()), faults
