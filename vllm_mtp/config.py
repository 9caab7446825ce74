"""Settings of ``mtp_tree``: names, ranges, defaults and the words when they are wrong.

Import-light on purpose: this module runs in the front-end process before any weight is
loaded, and knows neither torch nor vLLM.
"""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_ROWS = 64
"""Rows of one verify pass of a request, root included (ancestor bits of an int64)."""

MAX_STEPS = 16
MAX_TOPK = 32

SETTINGS_KEY = "vllm_mtp"
"""Where the settings travel: ``VllmConfig.additional_config[SETTINGS_KEY]``."""

METHOD = "mtp_tree"


class SettingsError(ValueError):
    """A setting of ``mtp_tree`` that cannot work; the message says what to change."""


@dataclass(frozen=True)
class TreeShape:
    """The size of every draft tree.

    Source: EAGLE-2, arXiv 2406.16858; SGLang calls the three ``num_steps``,
    ``eagle_topk`` and ``num_draft_tokens`` (which counts the root).
    """

    num_steps: int = 3
    """S, draft steps: the greatest depth of a node. 1 to 16."""

    topk: int = 4
    """k, branching: children found for each expanded node. 1 to 32; 1 drafts a
    chain."""

    num_nodes: int = 7
    """N, drafted nodes verified per step, the root not counted: 1 to 63, and no more
    than there are candidates. vLLM's ``num_speculative_tokens``."""

    frontier: int = -1
    """F, nodes expanded per step, the best of the last level: 1 to k; -1: k, as in
    EAGLE-2."""

    def __post_init__(self) -> None:
        _check_range("num_steps", self.num_steps, 1, MAX_STEPS)
        _check_range("topk", self.topk, 1, MAX_TOPK)
        if self.frontier == -1:
            object.__setattr__(self, "frontier", self.topk)
        _check_frontier(self.frontier, self.topk)
        _check_range("num_speculative_tokens", self.num_nodes, 1, MAX_ROWS - 1)
        if self.num_scratch_rows > MAX_ROWS:
            raise SettingsError(
                f"mtp_tree: num_steps={self.num_steps} with frontier={self.frontier} "
                f"expands {self.num_scratch_rows} nodes per request ((num_steps - 1) * "
                f"frontier, which is topk={self.topk} unless given); at most "
                f"{MAX_ROWS} are possible. Lower num_steps to at most "
                f"{MAX_ROWS // self.frontier + 1}, or frontier or topk to at most "
                f"{MAX_ROWS // (self.num_steps - 1)}."
            )
        if self.num_nodes > self.num_candidates:
            raise SettingsError(
                f"mtp_tree: num_speculative_tokens={self.num_nodes} nodes cannot be "
                f"chosen from the {self.num_candidates} candidates that "
                f"num_steps={self.num_steps}, topk={self.topk} and "
                f"frontier={self.frontier} make (topk + (num_steps - 1) * frontier * "
                f"topk). Use num_speculative_tokens from 1 to "
                f"{min(self.num_candidates, MAX_ROWS - 1)}, or raise num_steps, topk "
                "or frontier."
            )

    @property
    def is_tree(self) -> bool:
        """Whether nodes can have siblings; a chain is verified like vLLM's own."""
        return self.topk > 1

    @property
    def num_rows(self) -> int:
        """Query rows a request brings to a verify pass: the root and N nodes."""
        return self.num_nodes + 1

    @property
    def num_candidates(self) -> int:
        """C, nodes drafted per step, of which the best N are verified."""
        return self.candidates_of(self.num_steps)

    def candidates_of(self, num_steps: int) -> int:
        """Candidates of the first ``num_steps`` (at least one) drafting steps."""
        return candidates(num_steps, self.topk, self.frontier)

    @property
    def num_scratch_rows(self) -> int:
        """Nodes run through the MTP layer per request after the draft prefill."""
        return (self.num_steps - 1) * self.frontier

    def describe(self) -> str:
        """One line for the start-up log; the root is never counted as a node."""
        return (
            f"depth {self.num_steps}, branching {self.topk}, frontier {self.frontier}, "
            f"{self.num_candidates} candidates drafted per request and step, the best "
            f"{self.num_nodes} verified (the root is not counted; with it the target "
            f"runs {self.num_rows} rows a request)"
        )


def candidates(num_steps: int, topk: int, frontier: int) -> int:
    """Nodes drafted in ``num_steps`` levels: the root's children and the others'."""
    return topk + (num_steps - 1) * frontier * topk


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingsError(
            f"mtp_tree: {name}={value!r} must be a whole number from {low} to {high}."
        )
    if not low <= value <= high:
        raise SettingsError(
            f"mtp_tree: {name}={value} is out of range; use {low} to {high}."
        )


def _check_frontier(value: object, topk: int) -> None:
    if isinstance(value, int) and topk < value <= MAX_TOPK:
        raise SettingsError(
            f"mtp_tree: frontier={value} is out of range; use 1 to {topk}. It is at "
            f"most topk={topk}; raise topk for more."
        )
    _check_range("frontier", value, 1, topk)


SGLANG_NAMES = {
    "speculative_num_steps": "num_steps",
    "speculative_eagle_topk": "topk",
    "speculative_num_draft_tokens": "num_speculative_tokens",
}
"""SGLang's option to ours; its draft tokens count the root, ours do not."""

OWN_KEYS = (
    "shape",
    "num_steps",
    "topk",
    "num_speculative_tokens",
    "frontier",
    "max_draft_context",
    "share_nodes",
    "trace",
    "timing",
)
"""Keys this method adds to, or reads from, ``--speculative-config``."""

PASSED_KEYS = (
    "model",
    "revision",
    "code_revision",
    "quantization",
    "moe_backend",
    "kv_cache_dtype",
    "max_model_len",
    "draft_load_config",
    "draft_tensor_parallel_size",
    "disable_eagle_block_drop",
)
"""Keys handed to vLLM's own ``mtp`` unchanged."""

FIXED_KEYS: dict[str, tuple[Any, str]] = {
    "rejection_sample_method": (
        "standard",
        "mtp_tree always accepts exactly what the target's own sampler draws",
    ),
    "draft_sample_method": (
        "greedy",
        "mtp_tree always drafts with the noise the target's sampler will use",
    ),
    "enable_adaptive_verification": (False, "mtp_tree orders its nodes by score"),
    "parallel_drafting": (False, "the MTP layer drafts one depth at a time"),
    "use_local_argmax_reduction": (False, "branches need more than the best token"),
    "num_speculative_tokens_per_batch_size": (
        None,
        'draft counts follow measured cost with "shape": "auto"',
    ),
    "enforce_eager": (
        None,
        "vLLM's V2 runner does not read it; use --enforce-eager",
    ),
    "attention_backend": (
        None,
        "the draft uses the target's backend; set --attention-backend instead",
    ),
}
"""vLLM keys that only have one meaning here: the value accepted, and why."""


AUTO_SIZES = {"num_steps": 6, "topk": 3, "num_speculative_tokens": 12, "frontier": 2}
"""Largest tree of ``"shape": "auto"`` unless the user gives sizes."""

DYNAMIC_KEY = "num_speculative_tokens_per_batch_size"
"""vLLM's key that makes its scheduler look up a draft count every step."""

MAX_CONTEXT = 1 << 30
"""Largest ``max_draft_context``, in tokens."""

MAX_BATCH = 1 << 20
"""End of the one batch-size range given with that key."""


@dataclass(frozen=True)
class MTPConfig:
    """Everything ``mtp_tree`` needs in the worker processes."""

    shape: TreeShape = TreeShape()

    auto: bool = False
    """Whether the tree's size follows the load; ``shape`` is then the largest."""

    max_draft_context: int | None = None
    """Mean tokens of context of the running requests above which ``auto`` drafts
    nothing; None: no limit."""

    share_nodes: bool = False
    """Whether the sizes of ``auto`` include those whose batch shares its nodes."""

    trace: dict[str, Any] | None = None
    """Settings of the tree trace (``vllm_mtp.trace.settings``); None: no trace."""

    timing: bool = False
    """Whether the phases of each pass are timed, for the metrics."""

    def describe(self) -> str:
        """One line for the start-up log."""
        if not self.auto:
            return self.shape.describe()
        return f"the shape follows the load, up to {self.shape.describe()}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for ``VllmConfig.additional_config`` (it is hashed and sent)."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MTPConfig":
        """Inverse of ``to_dict``."""
        return cls(**{**values, "shape": TreeShape(**values["shape"])})


@dataclass(frozen=True)
class ParsedSettings:
    """A ``--speculative-config`` of method ``mtp_tree``, understood."""

    config: MTPConfig

    vllm_config: dict[str, Any]
    """The settings for vLLM's own ``mtp``: method, N and the passed-through keys."""

    translated: dict[str, str]
    """Words of the user -> what they became, for one log line."""


def parse_settings(settings: Mapping[str, Any]) -> ParsedSettings:
    """Understand a ``--speculative-config`` dictionary of method ``mtp_tree``.

    Missing sizes get defaults that fit the given ones. Raises ``SettingsError`` for
    unknown, contradicting or impossible settings, with the legal range or the nearest
    key.
    """
    given = {k.replace("-", "_"): v for k, v in settings.items() if k != "method"}
    translated = _translate_sglang_names(given)
    for key, value in given.items():
        _check_key(key, value)
    sizes = {name: given.get(name) for name in AUTO_SIZES}
    is_sized = any(size is not None for size in sizes.values())
    auto = _parse_policy(given.get("shape"), is_sized)
    shape = _fill_auto(sizes) if auto else _fill_shape(*sizes.values())
    if given.get("num_steps") not in (None, shape.num_steps):
        translated[f"num_steps={given['num_steps']}"] = (
            f"num_steps={shape.num_steps}, since a tree of {shape.num_nodes} nodes is "
            "no deeper"
        )
    passed = {k: v for k, v in given.items() if k in PASSED_KEYS}
    return ParsedSettings(
        config=MTPConfig(
            shape=shape,
            auto=auto,
            max_draft_context=_parse_limit(given.get("max_draft_context"), auto),
            share_nodes=_parse_sharing(given.get("share_nodes"), auto),
            trace=_parse_trace(given.get("trace")),
            timing=_parse_flag("timing", given.get("timing")),
        ),
        vllm_config={
            "method": "mtp",
            "num_speculative_tokens": shape.num_nodes,
            **({DYNAMIC_KEY: [[1, MAX_BATCH, shape.num_nodes]]} if auto else {}),
            **passed,
        },
        translated=translated,
    )


def _parse_policy(value: Any, is_sized: bool) -> bool:
    """Whether the shape is ``auto``: where nothing is said and no size is given."""
    if value is None:
        return not is_sized
    if value in ("auto", "fixed"):
        return bool(value == "auto")
    raise SettingsError(
        f'mtp_tree: shape={value!r} must be "auto" (the tree\'s size follows the load) '
        'or "fixed".'
    )


def _parse_limit(value: Any, auto: bool) -> int | None:
    if value is None:
        return None
    if not auto:
        raise SettingsError(
            f"mtp_tree: max_draft_context={value!r} needs the shape that follows the "
            'load. Set "shape": "auto", or remove max_draft_context.'
        )
    _check_range("max_draft_context", value, 1, MAX_CONTEXT)
    return int(value)


def _parse_sharing(value: Any, auto: bool) -> bool:
    shares = _parse_flag("share_nodes", value)
    if shares and not auto:
        raise SettingsError(
            "mtp_tree: share_nodes=true needs the shape that follows the load. Set "
            '"shape": "auto", or remove share_nodes.'
        )
    return shares


def _parse_trace(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    from vllm_mtp.trace.settings import TraceSettings

    return TraceSettings.parse(value).to_dict()


def _parse_flag(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise SettingsError(f"mtp_tree: {name}={value!r} must be true or false.")
    return bool(value)


def _translate_sglang_names(given: dict[str, Any]) -> dict[str, str]:
    """Replace SGLang's names in place; return what became what."""
    translated = {}
    for theirs, ours in SGLANG_NAMES.items():
        if theirs not in given:
            continue
        value = given.pop(theirs)
        if ours in given:
            raise SettingsError(
                f"mtp_tree: {theirs} and {ours} are two names for one setting; "
                f"keep {ours}."
            )
        if theirs == "speculative_num_draft_tokens" and isinstance(value, int):
            _check_range(theirs, value, 2, MAX_ROWS)
            value -= 1
        given[ours] = value
        translated[theirs] = f"{ours}={value}"
    return translated


def _check_key(key: str, value: Any) -> None:
    if key in OWN_KEYS or key in PASSED_KEYS:
        return
    if key in FIXED_KEYS:
        allowed, reason = FIXED_KEYS[key]
        if value == allowed:
            return
        raise SettingsError(
            f"mtp_tree: {key}={value!r} has no meaning here ({reason}). Remove it."
        )
    known = [*OWN_KEYS, *PASSED_KEYS, *SGLANG_NAMES]
    own = key.removeprefix("speculative_")
    word = own if own in known else key
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise SettingsError(
        f"mtp_tree: unknown setting {key!r}{hint} Known settings: "
        f"{', '.join(sorted(known))}."
    )


def _fill_auto(given: dict[str, Any]) -> TreeShape:
    """The largest tree of ``"shape": "auto"``; sizes left out fit those given."""
    limits = MAX_STEPS, MAX_TOPK, MAX_ROWS - 1
    for (name, value), limit in zip(given.items(), limits, strict=False):
        if value is not None:
            _check_range(name, value, 1, limit)
    steps, topk, nodes, frontier = given.values()
    if frontier is not None:
        _check_frontier(frontier, topk or MAX_TOPK)
    largest_steps, largest_topk, largest_nodes, widest = AUTO_SIZES.values()
    if nodes == 1:
        raise SettingsError(
            'mtp_tree: "shape": "auto" needs num_speculative_tokens of 2 or more, the '
            "largest tree to choose; found 1."
        )
    source = "" if topk or not frontier else f" (for frontier={frontier})"
    if topk is None:
        topk = max(min(largest_topk, nodes or largest_topk), frontier or 1)
    if frontier is None:
        frontier = min(widest, topk)
    if steps is None:
        steps = min(largest_steps, nodes or largest_steps, MAX_ROWS // frontier + 1)
    if nodes is None:
        nodes = min(max(largest_nodes, topk), candidates(steps, topk, frontier))
    if not 2 <= topk <= nodes:
        raise SettingsError(
            f'mtp_tree: "shape": "auto" with topk={topk}{source} and '
            f"num_speculative_tokens={nodes} leaves nothing to choose; use topk from 2 "
            "to num_speculative_tokens, or remove shape for chains."
        )
    return _fill_shape(steps, topk, nodes, frontier)


def _fill_shape(steps: Any, topk: Any, nodes: Any, frontier: Any) -> TreeShape:
    """Choose what is missing of a shape so that it fits what is given."""
    defaults = TreeShape()
    topk = defaults.topk if topk is None else topk
    _check_range("topk", topk, 1, MAX_TOPK)
    frontier = topk if frontier is None else frontier
    _check_frontier(frontier, topk)
    if steps is None:
        steps = defaults.num_steps
        if nodes is not None:
            _check_range("num_speculative_tokens", nodes, 1, MAX_ROWS - 1)
            # A chain of N nodes is N deep; a tree never needs more steps than nodes.
            steps = min(nodes, MAX_STEPS) if topk == 1 else min(steps, nodes)
    _check_range("num_steps", steps, 1, MAX_STEPS)
    if nodes is None:
        nodes = min(defaults.num_nodes, candidates(steps, topk, frontier))
    # The given sizes must fit each other as they are.
    TreeShape(steps, topk, nodes, frontier)
    return TreeShape(min(steps, nodes), topk, nodes, frontier)
