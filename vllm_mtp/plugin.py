"""The entry point vLLM calls: make ``{"method": "mtp_tree"}`` known, and nothing else.

vLLM loads general plugins in every process and sometimes more than once, so
``register`` is idempotent, imports neither CUDA nor Triton, and changes no behaviour
until the method is asked for.
"""


def register() -> None:
    """Teach ``EngineArgs`` the method ``mtp_tree``.

    Never raises: a vLLM that does not fit is only refused when the method is asked for.
    """
    from vllm_mtp import compat, cpu

    if cpu.is_requested():
        compat.use_torch_top_k_top_p()
    compat.hook_engine_args()
