"""The command line ``vllm-mtp``."""
