"""What passes of the inflated model read: ``python -m benchmarks.serving.cost``.

Bytes of weights; attention reads the KV cache beside them.
"""

import argparse
from typing import Any

from benchmarks.inflate import TINY, Inflation, Inflator

BYTES = 2
"""Of a bfloat16 weight."""


def count_bytes(shape: Inflation, config: dict[str, Any], rows: int) -> dict[str, int]:
    """Bytes that one pass reads if its rows choose their experts at random.

    Args:
        shape: The inflated model's.
        config: The tiny model's ``config.json``.
        rows: In the whole batch.

    Returns:
        Of a pass of the target and of one of the MTP layer (a draft level), each with
        the head; and what lies in the GPU's memory, embedding included.
    """
    heads, hidden = shape.num_attention_heads, shape.hidden_size
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = shape.qk_nope_head_dim, config["v_head_dim"]
    attention = (
        hidden * (shape.q_lora_rank + latent + rope + heads * value)
        + shape.q_lora_rank * heads * (nope + rope)
        + latent * heads * (nope + value)
    )
    dense = attention + 3 * hidden * shape.intermediate_size
    experts, expert = shape.n_routed_experts, 3 * hidden * shape.moe_intermediate_size
    fixed = attention + expert + experts * hidden
    chosen = experts * (1 - (1 - shape.num_experts_per_tok / experts) ** rows)
    num_dense = shape.first_k_dense_replace
    num_moe = shape.num_hidden_layers - num_dense
    head, mixing = shape.vocab_size * hidden, 2 * hidden * hidden
    moe = fixed + chosen * expert
    trained = config["num_hidden_layers"] - config["first_k_dense_replace"] + 1
    stored = min(num_moe + 1, trained + shape.weight_sets)
    sizes = {
        "target": num_dense * dense + num_moe * moe + head,
        "mtp": moe + mixing + head,
        "stored": stored * (fixed + experts * expert) + mixing + 2 * head,
    }
    return {name: round(BYTES * size) for name, size in sizes.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=Inflation.num_hidden_layers)
    shape = Inflation(num_hidden_layers=parser.parse_args().layers)
    config = Inflator(TINY, shape).config
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        sizes = count_bytes(shape, config, rows)
        print(f"{rows:>4} rows:", *(f"{k} {v / 1e9:.2f} GB" for k, v in sizes.items()))


if __name__ == "__main__":
    main()
