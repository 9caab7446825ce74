#!/usr/bin/env bash
# Serve with draft trees: the embedded model on a CPU, or on a GPU
#   MODEL=deepseek-ai/DeepSeek-R1 examples/serve.sh --tensor-parallel-size 8
# Further words go to vLLM. Then: python examples/client.py
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
model=${MODEL:-$here/tiny_deepseek/model}
settings=${SETTINGS:-'{"method": "mtp_tree"}'}

# The embedded model has no chat template of its own.
flags=()
if [[ -z ${MODEL:-} ]]; then
    flags+=(--chat-template "$here/tiny_deepseek/chat.jinja")
fi
flags+=(--served-model-name "${NAME:-tiny}" --port "${PORT:-8000}")
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    export TRITON_INTERPRET=1
    flags+=(--attention-backend CPU_MLA --dtype float32 --enforce-eager)
    flags+=(--max-model-len 512 --max-num-seqs 8 --kv-cache-memory-bytes 67108864)
fi
# `vllm serve` is the same, but does not start under vLLM's CPU build.
exec "$python" -m vllm.entrypoints.openai.api_server --model "$model" "${flags[@]}" \
    --speculative-config "$settings" "$@"
