"""Opens a checkpoint folder: its config and every tensor's header, nothing else."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from vllm_mtp.checkpoint.safetensors_file import (
    CheckpointError,
    TensorEntry,
    read_header,
)

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
SHARD_NUMBER = re.compile(r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})")


@dataclass(frozen=True)
class Checkpoint:
    """A folder of weights, as far as headers tell."""

    path: Path
    config: dict[str, Any]

    tensors: dict[str, TensorEntry]
    """By full name, in order of file and data."""

    @property
    def quantization_config(self) -> dict[str, Any]:
        """What the config says about quantisation; empty if nothing."""
        for key in ("quantization_config", "compression_config"):
            value = self.config.get(key)
            if isinstance(value, Mapping):
                return dict(value)
        return {}

    @property
    def is_nextn_folder(self) -> bool:
        """Whether the config says that this is a stand-alone draft folder."""
        names = self.config.get("architectures") or [""]
        return str(names[0]).endswith("NextN")


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Read the config and all headers of a checkpoint folder.

    Raises:
        CheckpointError: if the folder, its config, its index or one of its files is
            missing or broken, or if its weights are pickles.
    """
    path = Path(folder)
    config = read_config(path)
    weight_map = _read_index(path)
    files = _list_files(path) if weight_map is None else _indexed_files(weight_map)
    tensors: dict[str, TensorEntry] = {}
    paths = {name: path / name for name in files}
    for name in files:
        for entry in read_header(paths[name]).values():
            if entry.name in tensors:
                raise CheckpointError(
                    f"{path / name} holds {entry.name}, which "
                    f"{tensors[entry.name].file.name} holds too. Remove the file that "
                    "does not belong to this checkpoint."
                )
            tensors[entry.name] = entry
    held = {tensor: entry.file for tensor, entry in tensors.items()}
    for tensor, name in (weight_map or {}).items():
        if held.get(tensor) is not paths[name]:
            raise CheckpointError(
                f"{path / INDEX_NAME} says that {tensor} is in {name}, which does not "
                "hold it. Download both again, or write the index anew."
            )
    return Checkpoint(path, config, tensors)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights in any form, readable here or not."""
    suffixes = (".safetensors", *PICKLE_SUFFIXES)
    return (folder / INDEX_NAME).exists() or any(
        path.suffix in suffixes for path in folder.iterdir()
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's ``config.json``."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder. Give the local folder of a checkpoint; a model "
            "of a hub has to be downloaded first."
        )
    config = _read_json(folder / CONFIG_NAME)
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG_NAME} is not a JSON object.")
    return config


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. A checkpoint folder "
            "needs it."
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON ({error}). Download it again."
        ) from error


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return tensor -> file as the index says, or None where there is no index."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    index = _read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path} has no weight_map that names files. Download it again."
        )
    # One check a file, not one a tensor: DeepSeek-V3 has 163 files and 91,991 tensors.
    first = {str(name): (tensor, name) for tensor, name in weight_map.items()}
    for tensor, name in first.values():
        if not isinstance(name, str) or PurePath(name).name != name or "\\" in name:
            raise CheckpointError(
                f"{path} puts {tensor} into {name!r}; only files of the folder itself "
                "are read. Take a checkpoint from a source you trust."
            )
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{path} puts {tensor} into {name!r}; only .safetensors files are "
                "read, since other formats can run code. Convert the checkpoint."
            )
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{path} names {name}, which is not in the folder. Download it again."
            )
    return weight_map


def _indexed_files(weight_map: Mapping[str, str]) -> list[str]:
    return sorted(set(weight_map.values()))


def _list_files(folder: Path) -> list[str]:
    """Return the weight files of a folder without an index."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        pickles = sorted(
            path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES
        )
        if pickles:
            raise CheckpointError(
                f"{folder} holds its weights as {pickles[0]}, a pickle, which can run "
                "code when it is read. Only .safetensors files are read: convert the "
                "checkpoint, or download its safetensors version."
            )
        raise CheckpointError(f"{folder} holds no .safetensors file.")
    _check_shard_numbers(folder, names)
    return names


def _check_shard_numbers(folder: Path, names: list[str]) -> None:
    """Refuse a set of shards that says itself that one of them is missing."""
    for name in names:
        match = SHARD_NUMBER.fullmatch(Path(name).stem)
        if match is None:
            continue
        for index in range(1, int(match["count"]) + 1):
            other = f"{match['stem']}-{index:05d}-of-{match['count']}.safetensors"
            if not (folder / other).is_file():
                raise CheckpointError(
                    f"{folder / other} is missing, a shard of the same checkpoint as "
                    f"{name}. Download it again."
                )
