"""Measures one configuration over batch sizes, in a process of its own."""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from vllm_mtp.auto.ladder import Rung
from vllm_mtp.tuning.shapes import Shape

ROUNDS = {1: 4, 2: 3, 4: 2}
"""Batches of other prompts that are run one after the other; elsewhere one."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What every configuration is measured with."""

    model: str
    prompts: tuple[str, ...]
    batches: tuple[int, ...]
    input_len: int
    output_len: int
    temperature: float
    engine_args: dict[str, Any]


def measure_all(
    job: Job, shapes: Sequence[Shape], report: Callable[[str, list[Row], str], None]
) -> None:
    """Start an engine for each shape and measure; tell ``report`` after each.

    ``report(name, rows, error)``; an engine that fails has no rows and a reason, and
    the others go on. Each runs in a new process, so that the GPU is empty when the next
    one starts.
    """
    context = multiprocessing.get_context("spawn")
    for shape in shapes:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                report(shape.name, pool.submit(measure, job, shape).result(), "")
            except Exception as error:
                report(shape.name, [], f"{type(error).__name__}: {error}")


def measure(job: Job, shape: Shape) -> list[Row]:
    """Rows of one engine: ``shape``, ``batch``, ``tok_s``, ``accept_length``,
    ``step_ms`` and, for ``auto``, ``chose`` (``ChoiceWatch``).

    Prompts are read into the prefix cache first; only steps in which the whole batch
    decodes are timed.
    """
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from vllm_mtp.tuning.decode import decode, decode_rounds

    largest = max(job.batches)
    settings: dict[str, Any] = {
        "max_num_seqs": largest,
        "max_model_len": job.input_len + job.output_len + 128,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    llm = LLM(
        job.model,
        speculative_config=shape.speculative,
        **(settings | job.engine_args),
    )
    count = max(batch * ROUNDS.get(batch, 1) for batch in job.batches)
    prompts = cut_prompts(llm.get_tokenizer(), job.prompts, count, job.input_len)
    decode(llm, prompts, 0.0, 1)
    rows = []
    for batch in job.batches:
        decode(llm, prompts[:batch], job.temperature, 3 * shape.num_steps + 4)
        choices = ChoiceWatch(llm) if shape.is_auto else None
        window = decode_rounds(
            llm,
            prompts,
            batch,
            ROUNDS.get(batch, 1),
            job.temperature,
            job.output_len,
            choices,
        )
        row = {
            "shape": shape.name,
            "batch": batch,
            "tok_s": round(window.tokens_per_second, 1),
            "accept_length": round(window.accept_length, 3),
            "step_ms": round(window.step_ms, 3),
        }
        if choices is not None:
            row["chose"] = choices.most_used()
        rows.append(row)
    llm.llm_engine.engine_core.shutdown()
    return rows


def policy_of(llm: Any) -> Any:
    """What chooses for ``"shape": "auto"``; None without it.

    ``llm`` must run its engine in this process.
    """
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return getattr(scheduler, "shape_policy", None)


class ChoiceWatch:
    """Told of every step of a window, it knows what ``"shape": "auto"`` used there.

    At the end of a batch few requests are left, and other sizes are right for them.
    ``llm`` must run its engine in this process.
    """

    def __init__(self, llm: Any) -> None:
        self.policy = policy_of(llm)
        self.steps: Counter[int] = Counter()

    def __call__(self, step: int) -> None:
        self.steps[self.policy.current] += 1

    def most_used(self) -> list[int]:
        """The tree size of most steps (``Rung.to_list``)."""
        used = self.steps.most_common(1)
        rung: Rung = self.policy.ladder[used[0][0] if used else self.policy.current]
        return rung.to_list()


def cut_prompts(
    tokenizer: Any, texts: Sequence[str], count: int, length: int
) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens, each beginning with another text.

    Texts follow each other until the length is reached; none shares cached blocks with
    another, since the first tokens differ.
    """
    pieces = [tokenizer.encode(text + "\n\n") for text in texts]
    prompts = []
    for index in range(count):
        ids = list(tokenizer.encode(f"{index + 1}. "))
        turn = index
        while len(ids) < length:
            ids += pieces[turn % len(pieces)]
            turn += 1
        prompts.append(ids[:length])
    return prompts
