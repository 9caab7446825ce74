"""EAGLE-2 draft trees for DeepSeek MTP in vLLM.

Importing this package touches neither vLLM, CUDA nor Triton.
"""

__version__ = "0.1.0"
