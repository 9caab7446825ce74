"""Computations without speculation that round otherwise than the reference did."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tests.helpers.engine import runner_of

CHUNKS = (1, 4, 8, 16, 32)
"""Rows a pass: one as in decoding, few as in a verify pass, more as in a prefill."""

NOISY_RUNS = 128
"""Computed side by side, each with noise of its own."""

SUBLAYERS = ("self_attn", "mlp", "gate", "input_layernorm", "post_attention_layernorm")


class Noise:
    """Forward hooks that multiply by ``1 + level * normal``; 0 changes nothing.

    Outputs in float32 stay as they are: nothing is rounded to fewer bits there.
    """

    def __init__(self, model: Any) -> None:
        self.level = 0.0
        self.random = torch.Generator().manual_seed(0)
        self.hooks = [
            module.register_forward_hook(self._add)
            for name, module in model.named_modules()
            if name.rsplit(".", 1)[-1] in SUBLAYERS
        ]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _add(self, _module: Any, _args: Any, output: Any) -> Any:
        if self.level == 0:
            return output
        if isinstance(output, tuple):
            return tuple(map(self._one, output))
        return self._one(output)

    def _one(self, value: Any) -> Any:
        if not torch.is_tensor(value) or not value.is_floating_point():
            return value
        if value.element_size() > 2:
            return value
        noise = torch.randn(value.shape, generator=self.random).to(value.device)
        return (value.float() * (1 + self.level * noise)).to(value.dtype)


@contextlib.contextmanager
def step_budget(scheduler: Any, tokens: int) -> Iterator[None]:
    """At most ``tokens`` tokens a step, of all requests together."""
    before = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = tokens
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before


def controls(llm: Any) -> Iterator[tuple[str, int]]:
    """Sets the engine up for one control after another: name, number of computations.

    First the prompt in chunks of several sizes, where the engine takes chunks; then
    with noise of one rounding on the output of every sublayer, many times. Torch hooks
    make the noise, so it is missing where a prefill is compiled or replayed, and with
    several workers, whose models are in other processes.
    """
    engine = llm.llm_engine
    if engine.vllm_config.scheduler_config.enable_chunked_prefill:
        for rows in CHUNKS:
            with step_budget(engine.engine_core.engine_core.scheduler, rows):
                yield f"in chunks of {rows}", 1
    if engine.vllm_config.parallel_config.world_size > 1:
        return
    noise = Noise(runner_of(llm).model)
    # The most that rounding to the nearest changes numbers just below a power of two.
    noise.level = torch.finfo(engine.vllm_config.model_config.dtype).eps / 4
    try:
        yield "with noise", NOISY_RUNS
    finally:
        noise.remove()
