"""Checkpoint folders: every tensor found once, and what is missing is named."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.checkpoints import make_config, make_model, save_model, write_config
from vllm_mtp.checkpoint.folder import INDEX_NAME, open_checkpoint
from vllm_mtp.checkpoint.safetensors_file import CheckpointError


@pytest.fixture
def model(tmp_path):
    config = make_config()
    tensors = make_model(config)
    return save_model(tmp_path / "model", config, tensors), tensors


def edit_index(folder, **changes):
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


def test_finds_each_tensor_of_all_shards(model):
    folder, tensors = model
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors.keys() == tensors.keys()
    assert len({entry.file for entry in checkpoint.tensors.values()}) == 3
    assert checkpoint.config["hidden_size"] == 256
    assert not checkpoint.is_nextn_folder


def test_reads_a_folder_without_an_index(model):
    folder, tensors = model
    (folder / INDEX_NAME).unlink()
    assert open_checkpoint(folder).tensors.keys() == tensors.keys()


def test_files_outside_the_index_are_left_alone(model):
    """vLLM does the same: a consolidated copy beside the shards is not read."""
    folder, tensors = model
    (folder / "consolidated.safetensors").write_bytes(b"rubbish")
    assert open_checkpoint(folder).tensors.keys() == tensors.keys()


def refuse(folder, *words):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for word in words:
        assert word in str(caught.value)


def test_missing_shard_of_the_index(model):
    folder, _ = model
    (folder / "model-00002-of-00003.safetensors").unlink()
    refuse(folder, INDEX_NAME, "names model-00002-of-00003.safetensors, which is not")


def test_missing_shard_without_an_index(model):
    folder, _ = model
    (folder / INDEX_NAME).unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()
    refuse(folder, "model-00002-of-00003.safetensors is missing", "Download it again")


def test_truncated_shard(model):
    folder, _ = model
    path = folder / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refuse(folder, str(path), "is truncated")


def test_index_naming_a_tensor_that_no_file_holds(model):
    folder, _ = model
    edit_index(folder, ghost="model-00001-of-00003.safetensors")
    refuse(folder, "says that ghost is in model-00001-of-00003", "does not hold it")


def test_index_naming_the_wrong_file(model):
    folder, _ = model
    name = "model.embed_tokens.weight"
    edit_index(folder, **{name: "model-00002-of-00003.safetensors"})
    refuse(folder, f"{name} is in model-00002-of-00003.safetensors")


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", 3]
)
def test_index_reaching_out_of_the_folder(model, name):
    folder, _ = model
    edit_index(folder, ghost=name)
    refuse(folder, repr(name), "only files of the folder itself")


def test_index_naming_a_pickle(model):
    folder, _ = model
    edit_index(folder, ghost="pytorch_model.bin")
    refuse(folder, "'pytorch_model.bin'", "only .safetensors files are read")


@pytest.mark.parametrize("content", ["{}", "[]", '{"weight_map": {}}'])
def test_index_without_a_weight_map(model, content):
    folder, _ = model
    (folder / INDEX_NAME).write_text(content)
    refuse(folder, INDEX_NAME, "no weight_map")


def test_index_that_is_not_json(model):
    folder, _ = model
    (folder / INDEX_NAME).write_text("{")
    refuse(folder, INDEX_NAME, "is not JSON")


def test_one_tensor_in_two_files(model):
    folder, tensors = model
    (folder / INDEX_NAME).unlink()
    save_file({"lm_head.weight": tensors["lm_head.weight"]}, folder / "x.safetensors")
    refuse(folder, "x.safetensors holds lm_head.weight", "holds too")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_unread(tmp_path, name):
    write_config(tmp_path, make_config())
    torch.save({}, tmp_path / name)
    refuse(tmp_path, name, "a pickle, which can run code", "convert")


def test_no_weights_at_all(tmp_path):
    write_config(tmp_path, make_config())
    refuse(tmp_path, "holds no .safetensors file")


def test_no_config(tmp_path):
    refuse(tmp_path, "config.json cannot be read", "needs it")


@pytest.mark.parametrize(
    ("content", "words"), [("{", "is not JSON"), ("[]", "is not a JSON object")]
)
def test_config_that_is_no_config(tmp_path, content, words):
    (tmp_path / "config.json").write_text(content)
    refuse(tmp_path, "config.json", words)


def test_no_folder(tmp_path):
    refuse(tmp_path / "org" / "model", "is not a folder", "has to be downloaded")
