"""An engine under a tight scheduler: chunks, small KV pools, arrivals, aborts.

Everything is turned on a running engine, so that one engine serves a whole module: the
token budget of a step, and KV blocks held back from the pool.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.conftest import GPUS
from tests.helpers.controls import step_budget
from tests.helpers.engine import WITH_GRAPHS, counters, engine, runner_of

MAX_MODEL_LEN = 512 if GPUS else 192
BLOCK_SIZE = 16

SETTINGS: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16}
if GPUS:
    # Chunked prefill, prefix caching and async scheduling are vLLM's defaults there.
    SETTINGS |= {
        "attention_backend": None,
        "dtype": "bfloat16",
        **WITH_GRAPHS,
        "kv_cache_memory_bytes": 256 << 20,
    }


@contextlib.contextmanager
def gpu_scheduling_on_cpu() -> Iterator[None]:
    """Inside, a CPU engine is configured with what vLLM switches off on CPUs.

    Chunked prefill and prefix caching are off without AMX hardware, which the
    tree-aware CPU attention does not need, and async scheduling is off on every CPU.
    """
    from vllm.platforms.cpu import CpuPlatform

    configure = CpuPlatform.check_and_update_config
    choose_backend = CpuPlatform.get_attn_backend_cls

    @contextlib.contextmanager
    def as_if_amx() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
            yield

    def check_and_update_config(vllm_config: Any) -> None:
        with as_if_amx():
            configure(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    def get_attn_backend_cls(*args: Any, **kwargs: Any) -> str:
        with as_if_amx():
            return choose_backend(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for replacement in (check_and_update_config, get_attn_backend_cls):
            name = replacement.__name__
            patch.setattr(CpuPlatform, name, staticmethod(replacement))
        yield


@contextlib.contextmanager
def scheduled_engine(speculative: Any, **settings: Any) -> Iterator["Scheduled"]:
    """An engine with chunked prefill, prefix caching and async scheduling."""
    merged = {**SETTINGS, **settings}
    with contextlib.ExitStack() as stack:
        if not GPUS:
            merged = {"block_size": BLOCK_SIZE, **merged}
            merged["attention_backend"] = "AMX_MLA"
            stack.enter_context(gpu_scheduling_on_cpu())
        yield Scheduled(stack.enter_context(engine(speculative, **merged)))


DRAFT_KV_TOLERANCE = 0.3 if GPUS else 1e-4
"""A prompt in other chunks is other matrix products: a few roundings to bfloat16 of
normed entries up to 4, or of float32; a wrong token is 0.5 and more apart."""


@dataclass
class FirstDraft:
    """What a request's first draft step left behind."""

    tokens: list[int]
    parents: list[int]
    # [prompt length, Lkv + R] KV of the draft layer
    kv: torch.Tensor

    def assert_equal(self, other: "FirstDraft", what: str) -> None:
        gap = (self.kv - other.kv).abs().max().item()
        assert gap < DRAFT_KV_TOLERANCE, f"{what}: draft KV is {gap} apart"
        if not GPUS:
            # In bfloat16 candidates may tie.
            assert self.tokens == other.tokens, f"{what}: {self.tokens}"
            assert self.parents == other.parents, f"{what}: {self.parents}"


class Scheduled:
    """A running engine and the handles on its scheduler."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()
        self.preemptions = 0
        self.chunks: list[int] = []
        self.cached: dict[str, int | None] = {}
        self.outputs: dict[str, Any] = {}
        self._watch()

    def _watch(self) -> None:
        scheduler = self.scheduler
        preempt, schedule = scheduler._preempt_request, scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.chunks += output.num_scheduled_tokens.values()
            return output

        scheduler._preempt_request, scheduler.schedule = counted, watched

    @contextlib.contextmanager
    def budget(self, tokens: int) -> Iterator[None]:
        """At most ``tokens`` tokens a step, of all requests together."""
        with step_budget(self.scheduler, tokens):
            yield

    @contextlib.contextmanager
    def free_blocks(self, count: int) -> Iterator[None]:
        """All but ``count`` KV blocks are taken."""
        held = self.pool.get_new_blocks(self.pool.get_num_free_blocks() - count)
        try:
            yield
        finally:
            self.pool.free_blocks(held)

    def forget_prefixes(self) -> None:
        assert self.engine.reset_prefix_cache()

    def drive(
        self,
        requests: dict[str, tuple[list[int], Any]],
        arrivals: dict[str, int] | None = None,
        aborts: dict[str, int] | None = None,
    ) -> dict[str, list[int]]:
        """Serve the requests to the end: token ids of those that were not aborted.

        ``arrivals`` and ``aborts`` are numbers of steps by request id.
        """
        arrivals, aborts = dict(arrivals or {}), dict(aborts or {})
        waiting, finished, step = dict(requests), {}, 0
        while waiting or self.engine.has_unfinished_requests():
            for name in [n for n in waiting if arrivals.get(n, 0) <= step]:
                prompt, params = waiting.pop(name)
                self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
            for name in [n for n, at in aborts.items() if at <= step]:
                if name in waiting:
                    continue
                del aborts[name]
                self.engine.abort_request([name])
            for output in self.engine.step():
                self.cached[output.request_id] = output.num_cached_tokens
                self.outputs[output.request_id] = output
                if output.finished and output.outputs[0].finish_reason != "abort":
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            step += 1
            assert step < 100_000, "the engine makes no progress"
        self.settle()
        return finished

    def settle(self) -> None:
        """Collect the step in flight; every KV block must be free again."""
        while self.scheduler.has_requests() or self.core.batch_queue:
            self.engine.step()

    def assert_nothing_leaked(self) -> None:
        free = self.pool.get_num_free_blocks()
        assert free == self.free_at_start, f"{self.free_at_start - free} blocks leaked"

    @contextlib.contextmanager
    def first_drafts(self) -> Iterator[dict[tuple[str, int], FirstDraft]]:
        """Drafts by request and position of the last token read, while inside."""
        runner = runner_of(self.llm)
        speculator = runner.speculator
        propose, drafts = speculator.propose, {}
        (layer,) = speculator.draft_attn_layer_names
        context = runner.vllm_config.compilation_config.static_forward_context
        block_size = self.scheduler.block_size

        def watched(batch: Any, *args: Any, **kwargs: Any) -> Any:
            drafted = propose(batch, *args, **kwargs)
            table = runner.block_tables.block_tables[0].gpu
            for row, slot in enumerate(batch.idx_mapping_np.tolist()):
                last = int(speculator.root_positions[row])
                blocks = table[slot, : last // block_size + 1].long()
                kv = context[layer].kv_cache[blocks].flatten(0, 1)[: last + 1]
                drafts[batch.req_ids[row].rsplit("-", 1)[0], last] = FirstDraft(
                    drafted[row].tolist(),
                    speculator.tree.parents[slot].tolist(),
                    kv.float().cpu(),
                )
            return drafted

        speculator.propose = watched
        try:
            yield drafts
        finally:
            del speculator.propose

    def poison_free_blocks(self) -> None:
        """No KV of free blocks may be read: NaN, or on GPUs absurd values.

        Stock kernels there may multiply what is masked by zero.
        """
        blocks = [b.block_id for b in self.pool.free_block_queue.get_all_free_blocks()]
        for cache in runner_of(self.llm).kv_caches:
            cache[blocks] = 3e4 if GPUS else float("nan")

    def accepted(self) -> int:
        return int(counters(self.llm)["num_accepted_tokens"])
