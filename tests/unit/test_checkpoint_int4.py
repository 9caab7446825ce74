"""4-bit MTP layers, experts included: read completely, kernels aside.

vLLM's CPU build has no kernel for 4-bit experts and refuses to build them, so the
choice of a kernel is replaced; weights are then made and loaded as on a GPU.
"""

import importlib

import pytest
import torch

from tests.helpers.checkpoints import (
    INT4_CONFIGS,
    make_config,
    make_model,
    save_model,
    save_nextn,
    to_int4,
)
from tests.helpers.draft_models import layer_parameters, load_draft, one_rank
from vllm_mtp.config import SettingsError

CONFIG = make_config()
PREFIX = "model.layers.2."
EXPERTS = f"{PREFIX}mtp_block.mlp.experts.routed_experts."
QUANTIZATION = "vllm.model_executor.layers.quantization"
MODULES = {
    "awq": "auto_awq",
    "gptq": "auto_gptq",
    "compressed-tensors": "compressed_tensors.compressed_tensors_moe."
    "compressed_tensors_moe_wna16",
}


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


@pytest.fixture(params=sorted(MODULES))
def method(request, monkeypatch):
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend

    module = importlib.import_module(f"{QUANTIZATION}.{MODULES[request.param]}")
    chosen = WNA16MoEBackend.MARLIN, MarlinExperts
    monkeypatch.setattr(module, "select_wna16_moe_backend", lambda *_, **__: chosen)
    return request.param


@pytest.fixture
def tensors(method):
    """A 4-bit MTP layer beside a plain rest, whose precision plays no part here."""
    plain = make_model(CONFIG)
    layer = {k: v for k, v in plain.items() if k.startswith(PREFIX)}
    rest = {k: v for k, v in plain.items() if not k.startswith(PREFIX)}
    return rest | to_int4(layer, method)


@pytest.fixture(params=["embedded", "nextn"])
def load(request, method, tmp_path):
    quantized = CONFIG | {"quantization_config": INT4_CONFIGS[method]}

    def load(tensors):
        if request.param == "embedded":
            return load_draft(save_model(tmp_path / "m", quantized, tensors))
        target = save_model(tmp_path / "m", CONFIG, make_model(CONFIG))
        return load_draft(target, save_nextn(tmp_path / "n", quantized, tensors))

    return load


def test_every_expert_is_loaded(load, tensors, method):
    found = layer_parameters(load(tensors))
    last = "weight_packed" if method == "compressed-tensors" else "qweight"
    for expert in range(CONFIG["n_routed_experts"]):
        stored = tensors[f"{PREFIX}mlp.experts.{expert}.down_proj.{last}"]
        loaded = found[f"{EXPERTS}w2_{last}"][expert]
        # Stored and loaded may be each other's transpose, by method.
        assert sorted(loaded.shape) == sorted(stored.shape)
        match = loaded if loaded.shape == stored.shape else loaded.T
        assert torch.equal(match, stored)
    assert found[f"{PREFIX}eh_proj.weight"].dtype == torch.bfloat16


def test_a_missing_scale_of_one_expert_is_named(load, tensors, method):
    last = "weight_scale" if method == "compressed-tensors" else "scales"
    del tensors[f"{PREFIX}mlp.experts.2.up_proj.{last}"]
    with pytest.raises(SettingsError, match=rf"mlp\.experts\.2\.up_proj\.{last}"):
        load(tensors)
