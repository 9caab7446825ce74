"""What verifying, drafting and logprobs hold is in vLLM's profile before KV is sized.

On a GPU alone: the KV pool takes what the profile leaves of 95 % of its memory.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.inflate import Inflation
from benchmarks.serving import loader
from benchmarks.serving.setup import write_model
from tests.e2e.test_ids import mtp_tree
from tests.helpers.engine import counters, engine
from tests.helpers.prompts import held_out

REQUESTS, TOKENS = 256, 48
SHAPE = (5, 8, 32)


@pytest.mark.gpu
def test_a_full_batch_of_wide_trees_fits(tmp_path: Path) -> None:
    """32 nodes, 256 requests, 129,280 words, logprobs and penalties for all."""
    from vllm import SamplingParams

    write_model(tmp_path, Inflation(num_hidden_layers=6))
    settings: dict[str, Any] = {
        "model": str(tmp_path),
        "load_format": loader.LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "attention_backend": None,
        "dtype": "bfloat16",
        "enforce_eager": False,
        # Compiling is of no interest here.
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "max_model_len": 2048,
        "max_num_seqs": REQUESTS,
        "max_num_batched_tokens": REQUESTS * (SHAPE[-1] + 1),
        "gpu_memory_utilization": 0.95,
        "kv_cache_memory_bytes": None,
    }
    params = [
        SamplingParams(
            temperature=i % 2 * 0.8,
            seed=i,
            max_tokens=TOKENS,
            ignore_eos=True,
            logprobs=5,
            repetition_penalty=1.1,
            presence_penalty=0.3,
            top_p=0.9,
            detokenize=False,
        )
        for i in range(REQUESTS)
    ]
    prompts = held_out(32, (64,))
    inputs = [{"prompt_token_ids": prompts[i % 32]} for i in range(REQUESTS)]
    with engine(mtp_tree(*SHAPE), **settings) as llm:
        outputs = llm.generate(inputs, params, use_tqdm=False)
        config = llm.llm_engine.vllm_config.cache_config
        kv_bytes = config.num_gpu_blocks * config.block_size * 7 * 576 * 2
        steps = counters(llm)["num_drafts"] / REQUESTS
        del llm
    assert [len(o.outputs[0].token_ids) for o in outputs] == [TOKENS] * REQUESTS
    assert steps < TOKENS / 1.2, "no trees were accepted"
    total = torch.cuda.get_device_properties(0).total_memory
    # The pool has the rest of the memory, or this shows nothing.
    assert kv_bytes > 0.6 * total
    peak = torch.cuda.max_memory_reserved()
    print(f"\nof {total >> 20} MiB: peak {peak >> 20}, KV {kv_bytes >> 20}")
