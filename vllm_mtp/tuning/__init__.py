"""``vllm-mtp tune``: shapes side by side over batch sizes, one engine after another."""
