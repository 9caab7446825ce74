"""The specification of every kernel: plain torch, loops allowed, no Triton.

Each module has the name and the signature of its twin in ``vllm_mtp.kernels``.
"""
