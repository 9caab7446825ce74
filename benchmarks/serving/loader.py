"""vLLM's load format ``inflated``: builds and fills the inflated model.

Added layers that share a set of weights share its memory, and leave out passes that are
larger than any decoding batch (see ``Inflation.skip_above``).
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models import deepseek_v2

from benchmarks.inflate import Inflator

LOAD_FORMAT = "inflated"

open_inflator = functools.cache(Inflator.open)


def register() -> None:
    """Makes the load format known to vLLM in this process."""
    register_model_loader(LOAD_FORMAT)(InflatedLoader)


class InflatedLoader(BaseModelLoader):  # type: ignore[misc]
    """Makes the weights in place, for the target and for the MTP layer alike."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to download."""

    def create_model(
        self, vllm_config: Any, model_config: Any, prefix: str = ""
    ) -> Any:
        """Builds the model, with added layers that share memory."""
        with added_layers(open_inflator(Path(model_config.model))):
            return super().create_model(vllm_config, model_config, prefix)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Fills every parameter; routes the trained layers as the tiny model does."""
        inflator = open_inflator(Path(model_config.model))
        filled: set[int] = set()
        for name, parameter in model.named_parameters():
            if parameter.data_ptr() not in filled:
                filled.add(parameter.data_ptr())
                inflator.fill(name, parameter.data)
        for name, module in model.named_modules():
            match = re.search(r"layers\.(\d+)\.(?:mtp_block\.)?mlp\.experts$", name)
            if match and int(match[1]) in inflator.trained:
                route_like_tiny(module.router, inflator)


@contextlib.contextmanager
def added_layers(inflator: Inflator) -> Iterator[None]:
    """Inside, vLLM builds a target whose added layers share their sets of weights."""
    shape = inflator.shape
    original = deepseek_v2.DeepseekV2DecoderLayer
    sets: dict[tuple[bool, int], dict[str, Tensor]] = {}

    class Layer(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.is_added = self.layer_idx not in inflator.trained
            if not self.is_added:
                return
            key = (
                self.layer_idx < shape.first_k_dense_replace,
                self.layer_idx % shape.weight_sets,
            )
            own = dict(self.named_parameters())
            first = sets.setdefault(key, {n: p.data for n, p in own.items()})
            for name, parameter in own.items():
                parameter.data = first[name]

        def forward(
            self,
            positions: Tensor,
            hidden_states: Tensor,
            residual: Tensor | None,
            *args: Any,
        ) -> tuple[Tensor, Tensor | None]:
            if self.is_added and hidden_states.shape[0] > shape.skip_above:
                return hidden_states, residual
            return super().forward(positions, hidden_states, residual, *args)

    deepseek_v2.DeepseekV2DecoderLayer = Layer
    try:
        yield
    finally:
        deepseek_v2.DeepseekV2DecoderLayer = original


def route_like_tiny(router: Any, inflator: Inflator) -> None:
    """Lets a trained layer's router choose as the tiny model's does.

    No router weights could: the real experts' weights must not notice experts that are
    chosen beside them, and these must change from row to row. So a second router of the
    same class looks at the real experts' logits only, and the other experts follow from
    the remaining logits, one from each of as many equal parts.
    """
    config, real = inflator.config, inflator.config["n_routed_experts"]
    top_k = config["num_experts_per_tok"]
    tiny = object.__new__(type(router))
    tiny.__dict__.update(router.__dict__)
    tiny.top_k, tiny.global_num_experts = top_k, real
    tiny.num_expert_group, tiny.topk_group = config["n_group"], config["topk_group"]
    # A view: the values are there once weights are loaded.
    tiny.e_score_correction_bias = router.e_score_correction_bias.data[:real]
    parts = router.top_k - top_k
    part = (router.global_num_experts - real) // parts
    first = real + part * torch.arange(
        parts, dtype=torch.int32, device=tiny.e_score_correction_bias.device
    )

    def compute_routing(
        hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        weights, ids = tiny._compute_routing(
            hidden_states, router_logits[:, :real].contiguous(), *args, **kwargs
        )
        others = router_logits[:, real : real + parts * part]
        others = others.unflatten(1, (parts, part)).argmax(-1).to(torch.int32)
        ids = torch.cat([ids.to(torch.int32), others + first], dim=1)
        return torch.nn.functional.pad(weights, (0, parts)), ids

    router._compute_routing = compute_routing
