"""A batch at temperature 1, each request with its own seed.

    python examples/batch_seeds.py
    python examples/batch_seeds.py --speculative-config '{"method": "mtp_tree"}'

A seed fixes the text: with draft trees, without them, and whatever else is in the
batch. That is shown by running every prompt twice, the second time in reverse order.
In bfloat16 two equally likely tokens may still part (docs/verification.md).
"""

import argparse
import json
import os
from pathlib import Path

from offline_generate import cpu_settings

HERE = Path(__file__).parent
TINY = HERE / "tiny_deepseek" / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument(
        "--speculative-config", default='{"method": "mtp_tree"}', metavar="JSON"
    )
    args = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        max_model_len=512,
        speculative_config=json.loads(args.speculative_config),
        disable_log_stats=False,
        **cpu_settings(),
    )
    prompts = ["Once upon a time", "The answer is", "In the city of", "def main"]
    prompts = [prompts[i % len(prompts)] for i in range(args.num_prompts)]
    params = [
        SamplingParams(temperature=1.0, seed=100 + i, max_tokens=args.max_tokens)
        for i in range(len(prompts))
    ]
    first = llm.generate(prompts, params, use_tqdm=False)
    again = llm.generate(prompts[::-1], params[::-1], use_tqdm=False)[::-1]
    for i, output in enumerate(first):
        print(f"seed {100 + i}: {output.prompt!r} -> {output.outputs[0].text!r}")
    same = [
        list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
        for a, b in zip(first, again, strict=True)
    ]
    print(f"the same in another order: {sum(same)} of {len(same)}")
    counters = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    if drafts := counters.get("vllm:spec_decode_num_drafts"):
        accepted = counters["vllm:spec_decode_num_accepted_tokens"]
        print(f"mean accept length: {1 + accepted / drafts:.3f}")


if __name__ == "__main__":
    main()
