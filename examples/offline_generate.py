"""Generate with and without draft trees, offline, and compare.

    python examples/offline_generate.py                    # the embedded tiny model
    python examples/offline_generate.py --json --num-prompts 4
    python examples/offline_generate.py --model DeepSeek-R1 --tensor-parallel-size 8

On a machine without a GPU every kernel runs in Triton's interpreter: slowly, for real.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TINY = HERE / "tiny_deepseek" / "model"

FIXED = '{"method": "mtp_tree", "shape": "fixed"}'
"""With the default shape, "auto", trees depend on the speed of the machine."""


def main() -> None:
    args = parse_args()
    use_interpreter_without_gpu()
    settings = json.loads(args.speculative_config)
    say = (lambda words: None) if args.json else functools.partial(print, flush=True)
    prompts = load_prompts(args)

    say(f"Without speculation: {len(prompts)} prompts ...")
    plain = generate(args, prompts, None)
    say(f"With {json.dumps(settings)} ...")
    with tempfile.TemporaryDirectory() as folder:
        trace = str(Path(folder, "trace.jsonl"))
        tree = generate(args, prompts, {**settings, "trace": trace})
        report = compare(plain, tree, settings)
        if args.json:
            print(json.dumps(report))
        else:
            show(report, tree, trace)
    sys.exit(0 if report["identical"] else 1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--speculative-config", default=FIXED, metavar="JSON")
    parser.add_argument("--num-prompts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def use_interpreter_without_gpu() -> None:
    """Before anything imports Triton or vLLM."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def load_prompts(args: argparse.Namespace) -> list[Any]:
    """Held-out prompts of the tiny model, or a few questions for any other."""
    if Path(args.model).resolve() == TINY.resolve():
        entries = json.loads((HERE / "tiny_deepseek" / "prompts.json").read_text())
        return [{"prompt_token_ids": e["token_ids"]} for e in entries][
            : args.num_prompts
        ]
    return [
        f"Question {i}: what is {i} times 7? Answer:" for i in range(args.num_prompts)
    ]


def cpu_settings() -> dict[str, Any]:
    """What the engine needs where there is no GPU; nothing where there is one."""
    import torch

    if torch.cuda.is_available():
        return {}
    # vLLM's reference MLA backend, in float32 so that ids compare exactly.
    return {
        "attention_backend": "CPU_MLA",
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_seqs": 8,
    }


def generate(
    args: argparse.Namespace, prompts: list[Any], speculative: dict[str, Any] | None
) -> dict[str, Any]:
    """Run one engine; returns texts, token ids and vLLM's speculation counters."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        max_model_len=2048,
        tensor_parallel_size=args.tensor_parallel_size,
        speculative_config=speculative,
        disable_log_stats=False,
        **cpu_settings(),
    )
    params = SamplingParams(
        temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens
    )
    outputs = [
        o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=not args.json)
    ]
    counters = {
        m.name.removeprefix("vllm:spec_decode_"): getattr(m, "value", None)
        or getattr(m, "values", None)
        for m in llm.get_metrics()
        if m.name.startswith("vllm:spec_decode_")
    }
    del llm
    return {
        "texts": [o.text for o in outputs],
        "token_ids": [list(o.token_ids) for o in outputs],
        "counters": counters,
    }


def compare(
    plain: dict[str, Any], tree: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Steps are the target's passes over a request, its prefill included."""
    drafts = int(tree["counters"].get("num_drafts") or 0)
    accepted = int(tree["counters"].get("num_accepted_tokens") or 0)
    per_depth = tree["counters"].get("num_accepted_tokens_per_pos") or []
    tokens = sum(len(ids) for ids in tree["token_ids"])
    emitted_tokens = sum(len(ids) for ids in plain["token_ids"])
    return {
        "identical": plain["token_ids"] == tree["token_ids"],
        "accept_length": round(1 + accepted / drafts, 3) if drafts else None,
        "accepted_per_depth": [n for n in per_depth if n],
        "tokens": tokens,
        "steps": len(tree["token_ids"]) + drafts,
        "steps_without": emitted_tokens,
        "speculative_config": settings,
    }


def show(report: dict[str, Any], tree: dict[str, Any], trace: str) -> None:
    """Text, figures and one draft tree, in the terminal."""
    from rich.console import Console
    from rich.table import Table

    from vllm_mtp.trace.draw import draw_step
    from vllm_mtp.trace.load import load_trace

    console = Console()
    for i, text in enumerate(tree["texts"]):
        console.rule(f"output {i}")
        console.print(text, markup=False, highlight=False)
    console.rule("with against without")
    table = Table(show_header=False)
    table.add_row("token ids", "identical" if report["identical"] else "DIFFERENT")
    table.add_row("mean accept length", f"{report['accept_length']} tokens a step")
    table.add_row("accepted per depth", str(report["accepted_per_depth"]))
    saved = 1 - report["steps"] / report["steps_without"]
    table.add_row(
        "target passes",
        f"{report['steps']} instead of {report['steps_without']} ({saved:.0%} saved)",
    )
    console.print(table)
    steps = [s for s in load_trace(trace).steps if len(s.path) > 1]
    if steps:
        best = max(steps, key=lambda s: max(s.path))
        console.rule("one draft tree, the accepted path marked")
        console.print(draw_step(best))


if __name__ == "__main__":
    main()
