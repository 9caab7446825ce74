"""The draft model: vLLM's DeepSeek MTP layer, loaded as it is stored on disk."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_mtp.models.loader import load_mtp_layer

__all__ = ["load_mtp_layer"]


def __getattr__(name: str) -> Any:
    """Import vLLM only when the loader is used."""
    if name == "load_mtp_layer":
        from vllm_mtp.models.loader import load_mtp_layer

        return load_mtp_layer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
