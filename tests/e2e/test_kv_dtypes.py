"""An FP8 KV cache on the backends that have one: ids of no speculation with the same.

Committing copies bytes, so a verified entry is the one that a single step would have
written; what the kernels make of it is in tests/kernels.
"""

from typing import Any

import pytest

from tests.e2e.test_ids import mtp_tree, sampling
from tests.helpers.engine import WITH_GRAPHS, counters, engine, generate
from tests.helpers.margin import unequal_beyond_ties
from tests.helpers.prompts import held_out

COUNT, TOKENS = 16, 96
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    **WITH_GRAPHS,
    "max_num_seqs": COUNT,
    "kv_cache_memory_bytes": 1 << 30,
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["FLASHMLA", "TRITON_MLA"])
def test_fp8_kv_gives_the_ids_of_no_speculation(backend: str) -> None:
    prompts = held_out(COUNT, (1, 2, 7, 33, 64, 120))
    params = sampling(COUNT, (0.0, 0.8), TOKENS)
    settings = {**SETTINGS, "attention_backend": backend}
    with engine(mtp_tree(3, 4, 7), **settings) as llm:
        found = generate(llm, prompts, params)
        accepted = counters(llm)["num_accepted_tokens"]
    assert accepted > COUNT * TOKENS / 3
    with engine(**settings) as llm:
        expected = generate(llm, prompts, params)
        unequal = unequal_beyond_ties(
            llm, prompts, expected, found, params=params, measured=True
        )
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    print(f"\n{backend}: {same} of {COUNT} equal to the last token")
    assert unequal == []
