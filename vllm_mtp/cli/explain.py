"""``vllm-mtp explain``: what settings mean, before any weight is loaded."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_mtp.config import METHOD, ParsedSettings, SettingsError, parse_settings
from vllm_mtp.features import FEATURES, ServedBy

if TYPE_CHECKING:
    import torch

    from vllm_mtp.auto.ladder import Rung

EXIT_REFUSED = 1

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes per element of a KV cache dtype."""

COUNTS_ROOT = "speculative_num_draft_tokens"
"""The one of SGLang's numbers whose meaning differs from vLLM's."""

NOT_COUNTED = (
    "the top-k kernel's work space, about max_num_seqs x frontier x vocabulary / 28 "
    "bytes"
)

_STYLES = {ServedBy.TREE: "green", ServedBy.CHAIN: "yellow", ServedBy.NOTHING: "dim"}


@dataclass(frozen=True)
class Buffer:
    """One device tensor that stays allocated."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Model:
    """What a model's config says that matters here."""

    path: str
    architecture: str
    dtype: str
    num_layers: int
    num_mtp_layers: int
    latent_width: int
    """Elements per token and layer in the KV cache: kv_lora_rank + rope dimension."""

    refusal: str | None
    """Why mtp_tree would refuse the model, None if it would not."""


def explain(
    model: Annotated[
        Path | None,
        typer.Argument(help="Model folder; its config.json is enough."),
    ] = None,
    speculative_config: Annotated[
        str,
        typer.Option(metavar="JSON", help="As given to vLLM; left out: the defaults."),
    ] = "{}",
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Requests served at once, as given to vLLM.")
    ] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Token rows per pass, as given to vLLM.")
    ] = 8192,
    kv_cache_dtype: Annotated[
        str, typer.Option(help=f"auto, {', '.join(DTYPE_BYTES)}.")
    ] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of tables.")
    ] = False,
) -> None:
    """Print what the settings of mtp_tree mean: sizes, memory, and who gets a tree.

    Nothing is loaded; memory is per GPU and computed from the shapes the worker
    allocates. SGLang's names are understood in the settings: its
    speculative_num_draft_tokens counts the root, vLLM's num_speculative_tokens does
    not.
    The exit code is 1 if the settings or the model would be refused.

    Examples:

      vllm-mtp explain

      vllm-mtp explain MODEL --speculative-config '{"num_steps": 4, "topk": 2}'

      vllm-mtp explain --speculative-config '{"speculative_num_steps": 3,
      "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}'
    """
    settings = parse_speculative_config(speculative_config)
    about = None if model is None else read_model(model, settings)
    report = build_report(
        settings, about, max_num_seqs, max_num_batched_tokens, kv_cache_dtype
    )
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print_report(report)
    if report["refusals"]:
        raise typer.Exit(EXIT_REFUSED)


def parse_speculative_config(text: str) -> ParsedSettings:
    """Understand ``--speculative-config`` as the engine would.

    Raises:
        SettingsError: it is no JSON object, or a setting is refused.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"--speculative-config is not JSON ({error}). It is an object such as "
            '{"num_steps": 3, "topk": 4}.'
        ) from error
    if not isinstance(given, Mapping):
        raise SettingsError(
            f"--speculative-config must be a JSON object, found {text}."
        )
    method = given.get("method", METHOD)
    if method != METHOD:
        raise SettingsError(
            f"--speculative-config has method {method!r}; only {METHOD!r} is explained "
            "here."
        )
    return parse_settings(given)


def read_model(path: Path, settings: ParsedSettings) -> Model:
    """Read a model's config; the weights may be missing.

    Raises:
        SettingsError: there is no readable config.json.
    """
    from vllm_mtp.startup import check_model

    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no JSON, {error}"
        raise SettingsError(
            f"{file}: cannot be read ({reason}). MODEL is a local folder with a "
            "config.json; to look at a model of a hub, download that one file."
        ) from error
    if not isinstance(config, dict):
        raise SettingsError(f"{file}: not a JSON object.")
    refusal = None
    try:
        # No folder is named, so that only the config is judged, not the weights.
        judged = SimpleNamespace(model="", hf_config=SimpleNamespace(**config))
        check_model(judged, {"model": settings.vllm_config.get("model")})
    except SettingsError as error:
        refusal = str(error)
    return Model(
        path=str(path),
        architecture=str((config.get("architectures") or ["not declared"])[0]),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        num_layers=_whole(config, "num_hidden_layers"),
        num_mtp_layers=_whole(config, "num_nextn_predict_layers"),
        latent_width=_whole(config, "kv_lora_rank")
        + _whole(config, "qk_rope_head_dim"),
        refusal=refusal,
    )


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) else 0


def build_report(
    settings: ParsedSettings,
    model: Model | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_cache_dtype: str = "auto",
) -> dict[str, Any]:
    """Everything ``explain`` shows, as plain values."""
    shape = settings.config.shape
    buffers = list_buffers(settings, max_num_seqs, max_num_batched_tokens)
    scratch = None
    if model is not None and model.latent_width:
        scratch = _scratch_kv(settings, model, max_num_seqs, kv_cache_dtype)
    level_rows = max_num_seqs * shape.frontier
    refusals = [model.refusal] if model is not None and model.refusal else []
    if level_rows > max_num_batched_tokens:
        refusals.append(
            f"max_num_batched_tokens={max_num_batched_tokens} is too small for a draft "
            f"level of {level_rows} rows (max_num_seqs={max_num_seqs} x frontier="
            f"{shape.frontier}); raise it, or lower max_num_seqs or frontier (topk, "
            "unless given)."
        )
    return {
        "model": None if model is None else asdict(model),
        "settings": {
            "method": METHOD,
            "shape": "auto" if settings.config.auto else "fixed",
            "num_steps": shape.num_steps,
            "topk": shape.topk,
            "num_speculative_tokens": shape.num_nodes,
            "frontier": shape.frontier,
        },
        "sglang": {
            "speculative_num_steps": shape.num_steps,
            "speculative_eagle_topk": shape.topk,
            "speculative_num_draft_tokens": shape.num_rows,
        },
        "translated": settings.translated,
        "sizes": [rung.to_list() for rung in _list_rungs(settings)],
        "tree": {
            "depth": shape.num_steps,
            "branching": shape.topk,
            "frontier": shape.frontier,
            "candidates": shape.num_candidates,
            "nodes_verified": shape.num_nodes,
            "rows_with_root": shape.num_rows,
            "max_accept_length": min(shape.num_steps, shape.num_nodes) + 1,
            "mtp_rows_after_prefill": shape.num_scratch_rows,
        },
        "batch": {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "verify_rows": max_num_seqs * shape.num_rows,
            "draft_level_rows": level_rows,
        },
        "buffers": [asdict(buffer) for buffer in buffers],
        "buffer_bytes": sum(buffer.nbytes for buffer in buffers),
        "scratch_kv": scratch,
        "not_counted": NOT_COUNTED,
        "features": [
            {"name": f.name, "served_by": f.served_by.value, "why": f.why}
            for f in FEATURES
        ],
        "refusals": refusals,
    }


def _list_rungs(settings: ParsedSettings) -> "tuple[Rung, ...]":
    """Every size that ``"shape": "auto"`` chooses from, or the one there is."""
    from vllm_mtp.auto.ladder import build_ladder, rung_of

    config = settings.config
    if not config.auto:
        return (rung_of(config.shape),)
    return build_ladder(config.shape, config.share_nodes)


def list_buffers(
    settings: ParsedSettings, max_num_seqs: int, max_num_batched_tokens: int
) -> list[Buffer]:
    """The device buffers of one worker, built without memory on the meta device."""
    import torch

    from vllm_mtp.attention.state import build_attn_state
    from vllm_mtp.buffers import build_tree_buffers

    device = torch.device("meta")
    tree = build_tree_buffers(
        settings.config.shape, max_num_seqs, max_num_batched_tokens, device
    )
    frontiers = sorted({rung.frontier for rung in _list_rungs(settings)})
    attention = build_attn_state(tree, max_num_seqs, device, frontiers)
    found = [
        (field.name, getattr(owner, field.name))
        for owner in (tree, attention)
        for field in fields(owner)
    ]
    found += [("level_slots", attention.level_slots[f]) for f in frontiers]
    return [
        _describe(name, tensor)
        for name, tensor in found
        if isinstance(tensor, torch.Tensor)
    ]


def _describe(name: str, tensor: "torch.Tensor") -> Buffer:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Buffer(name, tuple(tensor.shape), dtype, tensor.nbytes)


def _scratch_kv(
    settings: ParsedSettings, model: Model, max_num_seqs: int, kv_cache_dtype: str
) -> dict[str, Any]:
    from vllm_mtp.attention.base import SCRATCH_BLOCK_SIZE

    dtype = model.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise SettingsError(
            f"KV cache dtype {dtype!r} is not known here; use --kv-cache-dtype with "
            f"one of {', '.join(DTYPE_BYTES)}."
        )
    rows = max_num_seqs * settings.config.shape.num_scratch_rows
    blocks = -(-rows // SCRATCH_BLOCK_SIZE)
    shape = (blocks, SCRATCH_BLOCK_SIZE, model.latent_width)
    nbytes = blocks * SCRATCH_BLOCK_SIZE * model.latent_width * DTYPE_BYTES[dtype]
    return {"shape": shape, "dtype": dtype, "nbytes": nbytes}


def _print_report(report: Mapping[str, Any]) -> None:
    console = Console(highlight=False)
    _print_tree(console, report)
    _print_memory(console, report)
    features = Table("request feature", "drafts", "why", box=None, pad_edge=False)
    for feature in report["features"]:
        served = ServedBy(feature["served_by"])
        features.add_row(
            feature["name"], Text(served.value, _STYLES[served]), feature["why"]
        )
    console.print(Text("\nWho gets a tree", "bold"))
    console.print(features)
    for refusal in report["refusals"]:
        console.print(Text(f"\nRefused: {refusal}", "red"))


def _describe_sizes(sizes: list[list[int]]) -> str:
    from vllm_mtp.auto.ladder import SHARED_FROM

    equal = ", ".join(f"{n} ({s})" for n, s, *drafts in sizes if n and not drafts)
    shared = ", ".join(f"{n} of {d[0]} ({s})" for n, s, *d in sizes if d)
    text = (
        "The shape follows the load: nothing is drafted, or so many nodes (in so many "
        f"levels): {equal}."
    )
    if shared:
        text += (
            f" From {SHARED_FROM} requests on also the best nodes of the whole batch, "
            f"so many a request of so many drafted: {shared}."
        )
    return text


def _print_tree(console: Console, report: Mapping[str, Any]) -> None:
    tree, batch, model = report["tree"], report["batch"], report["model"]
    k, steps = tree["branching"], tree["depth"]
    rows = [
        ("depth", f"{steps}", "num_steps: draft steps, each one level deeper"),
        ("branching", f"{k}", "topk: children per node"),
        ("frontier", f"{tree['frontier']}", "nodes expanded per level"),
        (
            "candidates",
            f"{tree['candidates']}",
            f"topk + (num_steps - 1) x frontier x topk = {k} + {steps - 1} x "
            f"{tree['frontier']} x {k}, "
            "drafted per request and step",
        ),
        (
            "nodes verified",
            f"{tree['nodes_verified']}",
            "num_speculative_tokens: the best of them; the root is not counted",
        ),
        (
            "rows",
            f"{tree['rows_with_root']}",
            "per request in the target's verify pass: the nodes and the root",
        ),
        (
            "accept length",
            f"1 to {tree['max_accept_length']}",
            "tokens a step emits",
        ),
        (
            "full batch",
            f"{batch['verify_rows']}",
            f"rows to verify with {batch['max_num_seqs']} requests; more than "
            f"max_num_batched_tokens={batch['max_num_batched_tokens']} are cut, the "
            "least likely nodes first",
        ),
    ]
    title = "Tree"
    if report["settings"]["shape"] == "auto":
        title = "Largest tree"
        console.print(Text("Sizes", "bold"))
        console.print(f"{_describe_sizes(report['sizes'])}\n")
    console.print(Text(title, "bold"))
    table = Table.grid(padding=(0, 2))
    for name, value, meaning in rows:
        table.add_row(name, Text(value, "bold"), Text(meaning, "dim"))
    console.print(table)
    sglang = ", ".join(f"{k} {v}" for k, v in report["sglang"].items())
    console.print(Text(f"SGLang's words for it: {sglang} (it counts the root)", "dim"))
    for theirs, ours in report["translated"].items():
        root = " (without the root)" if theirs == COUNTS_ROOT else ""
        console.print(Text(f"translated: {theirs} -> {ours}{root}", "yellow"))
    if model is not None:
        layers = f"{model['num_layers']} layers, {model['num_mtp_layers']} for MTP"
        console.print(
            Text(f"\nModel {model['path']}: {model['architecture']}, {layers}")
        )


def _print_memory(console: Console, report: Mapping[str, Any]) -> None:
    table = Table("buffer", "shape", "dtype", box=None, pad_edge=False)
    table.add_column("bytes", justify="right")
    for buffer in report["buffers"]:
        table.add_row(*_buffer_row(buffer["name"], buffer))
    table.add_row("sum", "", "", f"{report['buffer_bytes']:,}", style="bold")
    scratch = report["scratch_kv"]
    if scratch is not None:
        table.add_row(*_buffer_row("scratch KV of the MTP layer", scratch))
    console.print(Text("\nDevice memory per GPU, beside vLLM's own", "bold"))
    console.print(table)
    console.print(Text(f"Not counted: {NOT_COUNTED}.", "dim"))
    if scratch is None:
        console.print(
            Text("The scratch KV depends on the model: name its folder.", "dim")
        )


def _buffer_row(name: str, buffer: Mapping[str, Any]) -> tuple[str, str, str, str]:
    shape = " x ".join(map(str, buffer["shape"]))
    return name, shape, buffer["dtype"], f"{buffer['nbytes']:,}"
