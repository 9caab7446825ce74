"""Whether a layer's copy of the embedding or the head is the target's, by its bytes."""

from collections.abc import Mapping

from vllm_mtp.checkpoint.layer import StoredLayer
from vllm_mtp.checkpoint.layout import SHARED
from vllm_mtp.checkpoint.safetensors_file import TensorEntry

SAMPLED_ROWS = 64
"""Rows compared, evenly spaced. A copy that was trained further differs in about all of
them, so a sample tells without reading gigabytes."""


def find_own_copies(
    layer: StoredLayer, target: Mapping[str, TensorEntry]
) -> frozenset[str]:
    """Return which of a layer's embedding and head differ from the target's.

    Args:
        layer: of a draft folder.
        target: the tensors of the target's checkpoint; where it has no head of its
            own, the tied embedding takes its place.
    """
    tied = target.get("model.embed_tokens.weight")
    return frozenset(
        name
        for name, theirs in SHARED.items()
        if name in layer.tensors
        and not _same_rows(layer.tensors[name], target.get(theirs, tied))
    )


def _same_rows(ours: TensorEntry, theirs: TensorEntry | None) -> bool:
    if theirs is None or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    rows = ours.shape[0]
    row_bytes = ours.nbytes // max(rows, 1)
    step = max(rows // SAMPLED_ROWS, 1)
    with ours.file.open("rb") as our_file, theirs.file.open("rb") as their_file:
        for row in range(0, rows, step):
            our_file.seek(ours.offset + row * row_bytes)
            their_file.seek(theirs.offset + row * row_bytes)
            if our_file.read(row_bytes) != their_file.read(row_bytes):
                return False
    return True
