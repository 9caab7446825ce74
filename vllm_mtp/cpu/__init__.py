"""Run vLLM's V2 model runner without a GPU, every Triton kernel interpreted.

vLLM's CPU build falls back to its V1 runner unless a Triton backend named ``cpu``
exists. With ``TRITON_INTERPRET=1`` in the environment, ``activate`` registers a stub
of that name: kernels then run in Triton's interpreter, slowly but for real. Tests, the
demo and CI use it. Without that variable nothing happens at all, so a GPU install or a
CPU install that wants the V1 runner is never touched.
"""

import os


def is_requested() -> bool:
    """Whether the user asked for interpreted kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def activate() -> None:
    """Register the stub Triton backend if interpreted kernels were asked for.

    The entry point of the group ``vllm.platform_plugins``: vLLM calls it in every
    process while it detects the platform, which is before it looks for Triton.
    Returns None, which tells vLLM that this is no platform of its own. Idempotent.
    """
    if not is_requested():
        return
    from vllm_mtp.cpu.triton_backend import register_backend

    register_backend()
