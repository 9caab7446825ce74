"""Start-up measurement of step costs, under graph replay, and where it is kept."""

import functools
import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_mtp.auto.costs import (
    CostCacheError,
    CostTable,
    NoCostFileError,
    interpolate,
)
from vllm_mtp.auto.ladder import SHARED_FROM, Rung, graph_batches

logger = logging.getLogger("vllm." + __name__)

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (1024, 8192, 32768)

TIMED, LONG_STEP = 2, 25.0
"""Steps of a point that are timed; one is enough where it takes so many ms."""

BUDGET = 13.0
"""Seconds; points that would come later follow from those measured."""

NEW_WORDS = 11.0
"""The j-th row of a request after the first repeats an earlier one's token with the
chance ``j / (j + NEW_WORDS)``, as words come again in a text (a Chinese restaurant
process). So the rows of a tree go to as many experts as on held-out text of the
embedded model (docs/load.md)."""


def cost_key(vllm_config: Any) -> str:
    """Everything that changes step costs, as a short hash.

    The scheduler and the workers compute it in processes of their own, so it holds
    nothing that a worker changes in its configuration, and asks the driver for the
    GPU's name without making a CUDA context.
    """
    from importlib.metadata import version

    from vllm.platforms import current_platform

    from vllm_mtp import compat

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    parts = {
        "model": model.model,
        "revision": model.revision,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "layers": model.hf_text_config.to_dict(),
        "device": current_platform.get_device_name(),
        "tp": parallel.tensor_parallel_size,
        "ep": parallel.enable_expert_parallel,
        "kv": str(vllm_config.cache_config.cache_dtype),
        "seqs": vllm_config.scheduler_config.max_num_seqs,
        # How far the table reaches.
        "rows": vllm_config.scheduler_config.max_num_batched_tokens,
        "length": model.max_model_len,
        "eager": model.enforce_eager,
        "adapters": vllm_config.lora_config is not None,
        "compile": str(vllm_config.compilation_config.mode),
        "backend": str(vllm_config.attention_config.backend),
        "settings": compat.read_config(vllm_config).to_dict()["shape"],
        "versions": [compat.vllm_version(), version("vllm-mtp"), torch.__version__],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def cost_path(key: str) -> Path:
    """The cache file of a ``cost_key``: ``$VLLM_CACHE_ROOT/mtp_tree/<key>.json``."""
    import vllm.envs as envs

    return Path(envs.VLLM_CACHE_ROOT) / "mtp_tree" / f"{key}.json"


def load_or_measure(
    vllm_config: Any,
    ladder: Sequence[Rung],
    run_step: Callable[[Rung, int, int], None],
    is_first_rank: bool,
    agree: Callable[[bool], bool],
) -> None:
    """Make sure that the cost file is there.

    Args:
        vllm_config: The engine's.
        ladder: All rungs.
        run_step: ``run_step(rung, batch, context)`` runs one dummy decode step.
        is_first_rank: Whether this process writes the file.
        agree: Gives every rank the first rank's answer, since they measure together.
    """
    key = cost_key(vllm_config)
    path = cost_path(key)
    known = False
    if is_first_rank:
        try:
            CostTable.load(path, key, ladder)
            known = True
        except NoCostFileError:
            pass
        except CostCacheError as error:
            logger.warning(
                "mtp_tree: measuring step costs anew, since %s does not fit: %s.",
                path,
                error,
            )
    if agree(known):
        return
    begin = time.perf_counter()
    table = measure(vllm_config, ladder, run_step, agree)
    if is_first_rank:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(table.to_json(key, ladder), encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            logger.warning(
                "mtp_tree: step costs could not be kept in %s: %s. They will be "
                "measured again at the next start, and this run starts from typical "
                "ones. Set VLLM_CACHE_ROOT to a folder that can be written.",
                path,
                error,
            )
    logger.info("mtp_tree: measured step costs in %.1f s", time.perf_counter() - begin)


def measure(
    vllm_config: Any,
    ladder: Sequence[Rung],
    run_step: Callable[[Rung, int, int], None],
    agree: Callable[[bool], bool],
) -> CostTable:
    """Time every rung at a few batch sizes and contexts.

    At the shortest context every batch; at the others no speculation at every batch,
    trees at every third, and what a budget that runs out has left. Points not measured
    follow from these (``fill_table``).
    """
    max_seqs = vllm_config.scheduler_config.max_num_seqs
    batches = [b for b in BATCHES if b in graph_batches(max_seqs) and b < max_seqs]
    batches.append(max_seqs)
    limit = vllm_config.model_config.max_model_len - ladder[-1].num_nodes - 2
    contexts = [c for c in CONTEXTS if c <= limit] or [max(limit, 1)]
    max_rows = vllm_config.scheduler_config.max_num_batched_tokens
    found: dict[tuple[int, int, int], float] = {}
    begin = time.perf_counter()
    for context in contexts:
        ms = [0.0] * len(ladder)
        # The largest first, so that small batches are what a budget leaves out.
        for batch in batches if context == contexts[0] else reversed(batches):
            for index, rung in enumerate(ladder):
                if batch * (rung.num_drafts + 1) > max_rows:
                    continue
                if rung.is_shared and batch < SHARED_FROM:
                    continue
                if context != contexts[0] and index and batch not in batches[::-3]:
                    continue
                late = time.perf_counter() - begin > BUDGET
                if context != contexts[0] and agree(late):
                    continue
                # The batch before, or the shortest context, tells how long it may take.
                about = found.get((index, contexts[0], batch), ms[index])
                count = 1 if agree(about > LONG_STEP) else TIMED
                step = functools.partial(run_step, rung, batch, context)
                ms[index] = found[index, context, batch] = _time_steps(step, count)
    return fill_table(found, len(ladder), batches, contexts)


def _time_steps(run_step: Callable[[], None], count: int) -> float:
    """Milliseconds of a step, on the GPU where there is one.

    As in serving, the host is a step ahead: one that is not timed goes before.
    """
    run_step()
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        for _ in range(count):
            run_step()
        return (time.perf_counter() - begin) / count * 1e3
    new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    start, end = (new_event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run_step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def fill_table(
    found: dict[tuple[int, int, int], float],
    num_rungs: int,
    batches: Sequence[int],
    contexts: Sequence[int],
) -> CostTable:
    """A whole table from the points measured; costs never fall with the batch."""
    times: list[tuple[tuple[float, ...], ...]] = []
    zeros = [0.0] * len(batches)
    # A context of which nothing is known would look as cheap as the one before.
    measured = {context for rung, context, _ in found if rung == 0}
    contexts = [c for c in contexts if c == contexts[0] or c in measured]
    for rung in range(num_rungs):
        shortest: list[float] = []
        known = [batch for batch in batches if (rung, contexts[0], batch) in found]
        for at, batch in enumerate(batches):
            value = found.get((rung, contexts[0], batch))
            if known and batch < known[0]:
                # A size of larger batches only.
                value = found[rung, contexts[0], known[0]]
            if value is None:
                # Too many rows for one pass: as dear as it would have to be.
                last = shortest[-1] * batch / batches[at - 1] if shortest else 500.0
                value = 2 * last
            shortest.append(max([value, *shortest[-1:]]))
        rows = [tuple(shortest)]
        for context in contexts[1:]:
            added = _added(found, rung, batches, contexts[0], context)
            if not added and rung:
                # As much dearer as no speculation is.
                added = _added(found, 0, batches, contexts[0], context)
                ratios = [t / off for t, off in zip(shortest, times[0][0], strict=True)]
                added = [a * r for a, r in zip(added, ratios, strict=False)]
            values = [t + a for t, a in zip(shortest, added or zeros, strict=True)]
            rows.append(tuple(itertools.accumulate(values, max)))
        times.append(tuple(rows))
    return CostTable(tuple(batches), tuple(contexts), tuple(times))


def _added(
    found: dict[tuple[int, int, int], float],
    rung: int,
    batches: Sequence[int],
    short: int,
    long: int,
) -> list[float]:
    """Milliseconds that the longer context adds to a rung, for every batch.

    Attention reads so much more for every request: nothing for none, and a line between
    two batches measured. Empty: not measured for this rung.
    """
    xs, ys = [0.0], [0.0]
    for batch in batches:
        if (rung, long, batch) in found and (rung, short, batch) in found:
            xs.append(batch)
            ys.append(max(found[rung, long, batch] - found[rung, short, batch], 0.0))
    return [interpolate(xs, ys, batch) for batch in batches] if len(xs) > 1 else []


def repeat_some(token_ids: torch.Tensor, num_reqs: int) -> None:
    """Let rows repeat tokens of earlier rows of their request, in place.

    Words come again in a text, and in the branches of a tree: ``NEW_WORDS``. What is
    repeated goes to nearly the same experts, which are then read once.

    Args:
        token_ids: ``[rows]``, as many for each request, padding rows after them.
        num_reqs: Requests.
    """
    width = len(token_ids) // max(num_reqs, 1)
    rows = token_ids[: num_reqs * width].view(num_reqs, width)
    before = torch.arange(width, device=token_ids.device)
    # Every request repeats about as many (systematic sampling): few steps are timed.
    total = (before / (before + NEW_WORDS)).cumsum(0)
    passed = (total + torch.rand(num_reqs, 1, device=token_ids.device)).floor()
    repeats = passed.diff(dim=1, prepend=passed.new_zeros(num_reqs, 1)) > 0
    earlier = (torch.rand(rows.shape, device=token_ids.device) * before).long()
    source = torch.where(repeats, earlier, before)
    for _ in range(width.bit_length()):
        # What is repeated may be a repetition itself.
        source = source.gather(1, source)
    rows.copy_(rows.gather(1, source))
