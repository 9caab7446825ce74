"""Cheap checks of kernel arguments: a wrong call gets words, not an illegal access."""

import torch

INDEX_DTYPES = (torch.int32, torch.int64)
"""Integer arguments that kernels widen on load."""

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    min_shape: tuple[int, ...],
    like: torch.Tensor,
) -> None:
    """Raise unless dtype, device and shape fit and the last dimension is contiguous.

    Args:
        name: The argument's name, for the message.
        tensor: The argument.
        dtypes: Allowed dtypes.
        min_shape: Number of dimensions, and the least size of each.
        like: A tensor on the device expected.

    Raises:
        ValueError: On the first thing that does not fit.
    """
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {tensor.dtype}; use one of {dtypes}")
    if tensor.device != like.device:
        raise ValueError(f"{name}: on {tensor.device}, expected {like.device}")
    if tensor.dim() != len(min_shape) or any(
        size < least for size, least in zip(tensor.shape, min_shape, strict=True)
    ):
        raise ValueError(
            f"{name}: shape {tuple(tensor.shape)}, expected at least {min_shape}"
        )
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension has to be contiguous")
