"""vLLM's DeepSeek MTP model, built and loaded by a ``LoadPlan``."""

import contextvars
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP

from vllm_mtp import compat
from vllm_mtp.checkpoint.layout import EMBEDDING, HEAD, split_layer_name
from vllm_mtp.checkpoint.plan import LoadPlan
from vllm_mtp.models.quantization import build_quant_config
from vllm_mtp.models.weights import LayerStream, check_parameters

current_plan: contextvars.ContextVar[LoadPlan | None] = contextvars.ContextVar(
    "vllm_mtp_load_plan", default=None
)
"""Handed over beside vLLM's loader, which builds the model from a class alone."""


class SharedLater(nn.Module):
    """Stands in for the embedding or the head until the target's takes its place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class MTPDraftModel(DeepSeekMTP):  # type: ignore[misc]
    """One MTP layer, from the target's checkpoint or a folder of its own.

    It differs from its base in three ways: the layer is built from the target's config
    whatever a draft folder's says, each module in the precision of its tensors; the
    embedding and head that it shares are neither allocated nor read; and it is loaded
    from any layer index, completely or not at all.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        plan = current_plan.get()
        own = plan.own if plan is not None else frozenset()
        derived = derive_config(vllm_config, plan)
        modules = {EMBEDDING: "VocabParallelEmbedding", HEAD: "ParallelLMHead"}
        stand_ins = {modules[name]: SharedLater for name in modules if name not in own}
        with (
            compat.draft_modules_replaced(stand_ins),
            set_current_vllm_config(derived, prefix=prefix),
        ):
            super().__init__(vllm_config=derived, prefix=prefix)
        self.plan = plan
        self.has_own_embed_tokens = EMBEDDING in own
        self.has_own_lm_head = HEAD in own

    def is_unused_checkpoint_weight(self, name: str) -> bool:
        """Tell vLLM's loader which files it need not read."""
        parts = split_layer_name(name)
        if self.plan is None:
            return parts is None or parts[0] != self.config.num_hidden_layers
        return parts is None or parts[0] != self.plan.layer.index

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the layer; raise unless every parameter of it came from the files."""
        if self.plan is None:
            wanted = (
                item
                for item in weights
                if not self.is_unused_checkpoint_weight(item[0])
            )
            loaded: set[str] = super().load_weights(_without_copies(wanted))
        else:
            stream = LayerStream(self.plan, self.config.num_hidden_layers)
            loaded = super().load_weights(stream.read(weights))
            stream.check_all_read()
        check_parameters(self, loaded)
        return loaded


def _without_copies(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if not name.endswith((EMBEDDING, HEAD)):
            yield name, tensor


def derive_config(vllm_config: VllmConfig, plan: LoadPlan | None) -> VllmConfig:
    """Return the config that the layer is built from; the original stays as it is.

    The layer takes its shapes, its rotary table and its index from the target. vLLM's
    hash of compiled graphs does not look at quantisation, so what the plan decides is
    added to ``additional_config``, which it does look at.
    """
    hf_config = copy.deepcopy(vllm_config.model_config.hf_config)
    hf_config.num_nextn_predict_layers = 1
    model_config = copy.copy(vllm_config.model_config)
    model_config.hf_config = model_config.hf_text_config = hf_config
    draft = copy.copy(vllm_config.speculative_config.draft_model_config)
    draft.hf_config = draft.hf_text_config = hf_config
    speculative = copy.copy(vllm_config.speculative_config)
    speculative.draft_model_config = draft
    derived = copy.copy(vllm_config)
    derived.model_config = model_config
    derived.speculative_config = speculative
    if plan is not None:
        derived.quant_config = build_quant_config(vllm_config, plan)
        extra = dict(vllm_config.additional_config or {})
        derived.additional_config = extra | {"vllm_mtp_layer": plan.fingerprint()}
    return derived
