"""Shape of the tiny model, to and from a DeepSeek-V3 `config.json`."""

import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of the model; the fields carry their names in `config.json`."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 256
    moe_intermediate_size: int = 96
    num_hidden_layers: int = 3
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 2
    q_lora_rank: int = 64
    kv_lora_rank: int = 512
    # vLLM's CUDA prefill accepts few (nope, rope, v) triples; this is the smallest.
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    first_k_dense_replace: int = 1
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    rope_original_max_position: int = 4096
    rope_beta_fast: int = 32
    rope_beta_slow: int = 1
    rope_mscale: float = 1.0

    def to_hf(self) -> dict[str, Any]:
        """Returns the Hugging Face `config.json` of this shape."""
        values = dataclasses.asdict(self)
        rope = {key: values.pop(f"rope_{key}") for key in ("factor", "mscale")}
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "rope_scaling": {
                "type": "yarn",
                "factor": rope["factor"],
                "original_max_position_embeddings": values.pop(
                    "rope_original_max_position"
                ),
                "beta_fast": values.pop("rope_beta_fast"),
                "beta_slow": values.pop("rope_beta_slow"),
                "mscale": rope["mscale"],
                "mscale_all_dim": rope["mscale"],
            },
            **values,
            "num_key_value_heads": self.num_attention_heads,
            "max_position_embeddings": int(
                self.rope_factor * self.rope_original_max_position
            ),
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
        }

    @classmethod
    def from_hf(cls, path: Path) -> "ModelConfig":
        """Reads the shape back from a `config.json`."""
        raw = json.loads(path.read_text())
        rope = raw["rope_scaling"]
        raw |= {
            "rope_factor": rope["factor"],
            "rope_original_max_position": rope["original_max_position_embeddings"],
            "rope_beta_fast": rope["beta_fast"],
            "rope_beta_slow": rope["beta_slow"],
            "rope_mscale": rope["mscale"],
        }
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in raw.items() if key in names})
