"""Building and checking the draft model, piece by piece."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.helpers.checkpoints import (
    FP8_CONFIG,
    make_config,
    make_model,
    save_model,
    save_nextn,
)
from tests.helpers.draft_models import (
    layer_parameters,
    load_draft,
    make_vllm_config,
    one_rank,
)
from vllm_mtp.checkpoint.folder import open_checkpoint
from vllm_mtp.checkpoint.validate import check_embedded_layer
from vllm_mtp.config import SettingsError

CONFIG = make_config()
FP8 = CONFIG | {"quantization_config": FP8_CONFIG}
TENSORS = make_model(CONFIG)
PREFIX = "model.layers.2."


@pytest.fixture(scope="module", autouse=True)
def rank(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("rank")):
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target") / "m", CONFIG, TENSORS)


@pytest.fixture
def plan(target):
    return check_embedded_layer(open_checkpoint(target), CONFIG, 1)


class TestStream:
    def test_renames_to_the_targets_index(self, plan):
        from vllm_mtp.models.weights import LayerStream

        stream = LayerStream(plan, 61)
        names = [name for name, _ in stream.read(TENSORS.items())]
        assert len(names) == 30
        assert all(name.startswith("model.layers.61.") for name in names)
        assert not any("embed" in name or "head.head" in name for name in names)
        stream.check_all_read()

    def test_says_what_never_came(self, plan):
        from vllm_mtp.models.weights import LayerStream

        stream = LayerStream(plan, 2)
        some = {k: v for k, v in TENSORS.items() if "enorm" not in k}
        list(stream.read(some.items()))
        with pytest.raises(SettingsError, match=r"not read: model.layers.2.enorm.wei"):
            stream.check_all_read()

    def test_experts_of_other_ranks_may_stay_away(self, plan):
        """With expert parallelism vLLM does not read them."""
        from vllm_mtp.models.weights import LayerStream

        stream = LayerStream(plan, 2)
        some = {k: v for k, v in TENSORS.items() if "experts.3." not in k}
        list(stream.read(some.items()))
        stream.check_all_read()

    @pytest.mark.parametrize("reverse", [False, True])
    def test_scale_may_come_before_its_weight(self, tmp_path, reverse):
        """Loaders that reorder files hand them over in any order."""
        from vllm_mtp.models.weights import LayerStream

        tensors = make_model(CONFIG, fp8=True)
        name = f"{PREFIX}self_attn.q_a_proj.weight"
        tensors.pop(f"{name}_scale_inv")
        tensors[name] = TENSORS[name]
        plan = check_embedded_layer(
            open_checkpoint(save_model(tmp_path, FP8, tensors)), CONFIG, 1
        )
        items = sorted(tensors.items(), reverse=reverse)
        found = dict(LayerStream(plan, 2).read(items))
        joined = f"{PREFIX}self_attn.kv_a_proj_with_mqa.weight"
        assert found[joined].dtype == torch.float32
        assert f"{joined}_scale_inv" not in found

    def test_dequantize(self):
        from vllm_mtp.models.weights import dequantize

        weight = torch.randn(200, 130).to(torch.float8_e4m3fn)
        scale = torch.rand(2, 2)
        found = dequantize(weight, scale, (128, 128))
        for row, column in [(0, 0), (127, 127), (128, 0), (199, 129), (5, 128)]:
            expected = weight[row, column].float() * scale[row // 128, column // 128]
            assert found[row, column] == expected


class TestParameters:
    @pytest.fixture
    def model(self):
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(2))
        model.empty = nn.Parameter(torch.zeros(0))
        model.k_scale = nn.Parameter(torch.zeros(1))
        model.g_idx = nn.Parameter(torch.zeros(1))
        return model

    def test_all_loaded(self, model):
        from vllm_mtp.models.weights import check_parameters

        check_parameters(model, {"weight"})

    def test_one_left_out(self, model):
        from vllm_mtp.models.weights import check_parameters

        with pytest.raises(
            SettingsError, match=r"1 parameters .*: weight. Run vllm-mt"
        ):
            check_parameters(model, set())


class TestAfterLoading:
    def test_nothing_to_share(self):
        """Another pipeline stage holds the target's embedding."""
        from vllm_mtp.models.draft_model import SharedLater
        from vllm_mtp.models.loader import _check_shared

        model = nn.Module()
        model.embed_tokens = SharedLater(1, 2, prefix="x")
        with pytest.raises(SettingsError, match="pipeline_parallel_size=1"):
            _check_shared(model)

    def test_short_rotary_table(self):
        from vllm_mtp.models.loader import _check_rotary_table

        model = nn.Module()
        model.rotary = nn.Module()
        model.rotary.cos_sin_cache = torch.zeros(64, 8)
        _check_rotary_table(model, 64)
        with pytest.raises(SettingsError) as caught:
            _check_rotary_table(model, 65)
        message = str(caught.value)
        assert "covers 64 positions, but max_model_len is 65" in message
        assert "(rotary)" in message

    def test_architecture_is_put_back(self, target, monkeypatch):
        from vllm.v1.worker.gpu.spec_decode.eagle import utils

        from vllm_mtp import compat
        from vllm_mtp.models.draft_model import MTPDraftModel

        vllm_config = make_vllm_config(target)
        hf_config = vllm_config.speculative_config.draft_model_config.hf_config
        before = hf_config.architectures

        def fail(target_model, given):
            assert hf_config.architectures == ["MTPTreeDraftModel"]
            raise RuntimeError("full disk")

        monkeypatch.setattr(utils, "load_eagle_model", fail)
        with pytest.raises(RuntimeError, match="full disk"):
            compat.load_draft_model(
                None, vllm_config, "MTPTreeDraftModel", MTPDraftModel
            )
        assert hf_config.architectures == before == ["DeepSeekMTPModel"]


class TestConfig:
    def test_the_engines_config_stays_as_it_is(self, target, plan):
        from vllm_mtp.models.draft_model import derive_config

        vllm_config = make_vllm_config(target)
        before = vllm_config.compute_hash()
        derived = derive_config(vllm_config, plan)
        assert vllm_config.compute_hash() == before
        assert not vllm_config.additional_config
        assert derived.compilation_config is vllm_config.compilation_config

    def test_graphs_of_another_precision_are_not_reused(self, tmp_path, target):
        """vLLM's own hash is the same for both: the configs do not differ."""
        from vllm_mtp.models.draft_model import derive_config

        hashes = set()
        for mtp_fp8 in (False, True):
            tensors = make_model(CONFIG, fp8=True, mtp_fp8=mtp_fp8)
            folder = save_model(tmp_path / "m", FP8, tensors)
            plan = check_embedded_layer(open_checkpoint(folder), CONFIG, 1)
            hashes.add(derive_config(make_vllm_config(folder), plan).compute_hash())
        assert len(hashes) == 2

    def test_quantisation_that_the_user_asks_for_reaches_the_draft(self, target, plan):
        """--quantization on a plain checkpoint, as vLLM's own MTP does it."""
        from vllm_mtp.models.quantization import build_quant_config

        vllm_config = make_vllm_config(target, quantization="fp8_per_tensor")
        assert vllm_config.quant_config is not None
        assert build_quant_config(vllm_config, plan) is vllm_config.quant_config


class TestWeightsWithoutFiles:
    def test_random_weights(self, target):
        """--load-format dummy is a benchmark's wish, not a checkpoint's fault."""
        model = load_draft(target, load_format="dummy")
        [stub] = model.target_stub
        assert model.model.embed_tokens is stub.model.embed_tokens
        assert model.plan is None

    def test_streamed_weights(self, target, monkeypatch):
        """No headers to plan by: the layer is taken from the target's index."""
        monkeypatch.setattr("vllm_mtp.models.loader.make_plan", lambda _: None)
        model = load_draft(target)
        found = layer_parameters(model)[f"{PREFIX}eh_proj.weight"]
        assert torch.equal(found, TENSORS[f"{PREFIX}eh_proj.weight"])

    def test_streamed_weights_are_checked(self, tmp_path, monkeypatch):
        tensors = {k: v for k, v in TENSORS.items() if "2.hnorm" not in k}
        monkeypatch.setattr("vllm_mtp.models.loader.make_plan", lambda _: None)
        with pytest.raises(SettingsError, match=r"layers.2.hnorm.weight"):
            load_draft(save_model(tmp_path, CONFIG, tensors))


class TestFindFolder:
    def find(self, monkeypatch, asked=(), **fields):
        from vllm_mtp.models import loader

        def download(name, cache, patterns, revision, ignore_patterns):
            assert (name, cache, revision) == ("org/model", "/cache", "main")
            asked.append(patterns)
            assert ignore_patterns == ["original/**/*"]
            return "/cache/model"

        monkeypatch.setattr(loader, "download_weights_from_hf", download)
        model_config = SimpleNamespace(**{"revision": "main", **fields})
        load_config = SimpleNamespace(
            download_dir="/cache", ignore_patterns=["original/**/*"]
        )
        return loader._find_folder(model_config, load_config)

    def test_local(self, monkeypatch, tmp_path):
        assert self.find(monkeypatch, model=str(tmp_path)) == tmp_path

    def test_hub(self, monkeypatch):
        asked = []
        found = self.find(monkeypatch, asked, model="org/model")
        assert found == Path("/cache/model")
        assert asked == [["config.json"], ["*.safetensors"]]

    def test_object_store(self, monkeypatch, tmp_path):
        found = self.find(monkeypatch, model=str(tmp_path), model_weights="s3://x")
        assert found is None


def test_target_without_files_keeps_a_folders_own_copies(target, tmp_path, monkeypatch):
    """What cannot be compared is not taken for equal."""
    from vllm_mtp.models import loader

    draft = save_nextn(tmp_path, CONFIG, TENSORS, own=True)
    vllm_config = make_vllm_config(target, draft)
    find = loader._find_folder
    monkeypatch.setattr(
        loader,
        "_find_folder",
        lambda config, load: find(config, load) if config.runner == "draft" else None,
    )
    plan = loader.make_plan(vllm_config)
    assert plan.own == {"embed_tokens.weight", "shared_head.head.weight"}


def test_models_is_imported_without_vllm():
    """``vllm_mtp.models`` alone must stay cheap; an unknown name fails as usual."""
    import vllm_mtp.models

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vllm_mtp.models.nothing


@pytest.mark.parametrize("separate", [False, True])
def test_model_of_a_hub_is_planned_once_it_is_there(
    target, tmp_path, monkeypatch, separate
):
    """Named by an id, its files are read from where the download put them."""
    from vllm_mtp.models import loader

    draft = save_nextn(tmp_path, CONFIG, TENSORS) if separate else None
    vllm_config = make_vllm_config(target, draft)
    places = {"org/target": target, "org/draft": draft}
    monkeypatch.setattr(
        loader, "download_weights_from_hf", lambda name, *_, **__: places[name]
    )
    vllm_config.model_config.model = "org/target"
    draft_config = vllm_config.speculative_config.draft_model_config
    draft_config.model = "org/draft" if separate else "org/target"
    plan = loader.make_plan(vllm_config)
    assert plan.layer.index == (0 if separate else 2)
    assert plan.is_separate is separate
