"""Fills the generated sections of README.md and docs/ from results and from code.

    python -m benchmarks.report            # rewrite what is out of date
    python -m benchmarks.report --check    # only name it; the exit code is then 1

A section stands between ``<!-- results:NAME -->`` and ``<!-- /results -->`` (made from
the JSON files in ``benchmarks/results``) or ``<!-- code:NAME -->`` and ``<!-- /code
-->`` (made from the package). Where a file is missing the section says "not measured
yet"; no number of the documents is typed by hand.
"""

import argparse
import ast
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.text_model import by_size, model_errors

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

NOT_MEASURED = "not measured yet"
MARKER = re.compile(r"<!-- (results|code):(\w+) -->\n.*?<!-- /\1 -->", re.DOTALL)

Record = dict[str, Any]
Rows = list[dict[str, Any]]


def read_record(name: str, folder: Path | None = None) -> Record | None:
    """A result file as it was written; None where there is none."""
    path = (folder or RESULTS) / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


# --- tables ---------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers stand to the right."""
    rows = [[_cell(value) for value in row] for row in rows]
    numeric = [
        bool(rows) and all(re.fullmatch(r"[\d.x-]+", row[i]) for row in rows)
        for i in range(len(header))
    ]
    rule = ["---:" if right else "---" for right in numeric]
    lines = [list(header), rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return "/".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace("|", "\\|")


def times(ratio: float) -> str:
    """A ratio as ``1.23x``."""
    return f"{ratio:.2f}x"


def provenance(name: str, record: Record) -> str:
    """Where the numbers come from, in a line."""
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items() if v)
    others = "".join(
        f" Of commit `{other['commit']}`: T = {other['temperature']:g}, input "
        f"{other['input_len']}, {', '.join(f'`{s}`' for s in other['shapes'])}."
        for other in record.get("others", ())
    )
    where = f"{record['gpu'] or 'CPU'}, commit `{record['commit'][:9]}`"
    file = f"[`{name}.json`](../benchmarks/results/{name}.json)"
    return f"{file}: {where}, {versions}.{others}"


def section(name: str, make: Callable[[Record], str]) -> str:
    """Body of a results section of docs/benchmarks.md."""
    record = read_record(name)
    if record is None:
        return f"`benchmarks/results/{name}.json`: {NOT_MEASURED}."
    return f"{make(record)}\n\n{provenance(name, record)}"


# --- results --------------------------------------------------------------------------


def bookkeeping_table(record: Record) -> str:
    """Microseconds of each kernel by batch."""
    rows: Rows = record["rows"]
    batches = sorted({row["batch"] for row in rows})
    found = {(row["what"], row["batch"]): row["us"] for row in rows}
    names = list(dict.fromkeys(row["what"] for row in rows))
    return table(
        ["µs per launch, by batch", *map(str, batches)],
        ([f"`{name}`", *(found.get((name, b)) for b in batches)] for name in names),
    )


def attention_table(record: Record) -> str:
    """Every row, with the ratio to a causal pass."""
    order = ("heads", "batch", "context", "rows")
    rows = sorted(record["rows"], key=lambda row: [row[key] for key in order])
    return table(
        [
            "batch x context, heads",
            "rows",
            "trees on FA3, µs",
            "FA3 chain, µs",
            "ratio",
            "trees, Triton only, µs",
            "stock TRITON_MLA, µs",
            "one row, FA3, µs",
        ],
        (
            [
                f"{row['batch']} x {row['context']}, {row['heads']}",
                row["rows"],
                row["ours_us"],
                row["fa3_chain_us"],
                times(row["ours_us"] / row["fa3_chain_us"]),
                row.get("triton_only_us"),
                row.get("stock_triton_us"),
                row.get("one_row_us"),
            ]
            for row in rows
        ),
    )


def experts_table(record: Record) -> str:
    """Different experts that a step reaches, by the size of the tree."""
    return table(
        ["nodes, depth", "batch", "text", "timed", "random", "timed / text"],
        (
            [
                f"{row['nodes']}, {row['depth']}",
                *(row[key] for key in ("batch", "text", "timed", "random")),
                times(row["timed"] / row["text"]),
            ]
            for row in record["rows"]
        ),
    )


def acceptance_table(record: Record) -> str:
    """Accept length by method and nodes, a column per temperature."""
    rows: Rows = record["rows"]
    temperatures = sorted({row["temperature"] for row in rows})
    found = {
        (row["method"], row["nodes"], row["temperature"]): row["accept_length"]
        for row in rows
    }
    kinds = list(dict.fromkeys((row["method"], row["nodes"]) for row in rows))
    text = table(
        ["method", "nodes", *(f"T = {t:g}" for t in temperatures)],
        (
            [f"`{m}`", n, *(found.get((m, n, t)) for t in temperatures)]
            for m, n in kinds
        ),
    )
    if "prompts" in record:
        text += f"\n\n{record['prompts']} prompts, {record['tokens']} tokens each."
    return text


def pivot(
    rows: Rows, column: str, title: str, cell: Callable[[dict[str, Any]], str], key: str
) -> str:
    """A line for each temperature and ``key``, a column for each ``column``."""
    found = {(row["temperature"], row[key], row[column]): row for row in rows}
    columns = {row[column]: title.format_map(row) for row in rows}
    kinds = sorted({(row["temperature"], row[key]) for row in rows})
    return table(
        ["T", key, *(columns[at] for at in sorted(columns))],
        (
            [
                *kind,
                *(
                    cell(found[*kind, at]) if (*kind, at) in found else None
                    for at in sorted(columns)
                ),
            ]
            for kind in kinds
        ),
    )


def calibration_table(record: Record) -> str:
    """Predicted and observed acceptance by depth, a column for each bin."""

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['predicted']:.2f} / {row['observed']:.2f} ({row['nodes']})"

    return pivot(record["rows"], "low", "{low:g} to {high:g}", cell, "depth")


SERVING_COLUMNS = {
    "T": "temperature",
    "input": "input_len",
    "batch": "batch",
    "off, tok/s": "off_tok_s",
    "best chain": "chain",
    "chain, tok/s": "chain_tok_s",
    "chain accept length": "chain_accept_length",
    "best tree": "tree",
    "tree, tok/s": "tree_tok_s",
    "tree accept length": "tree_accept_length",
}


def serving_table(record: Record) -> str:
    """Output tokens per second: without, best chain, best tree (steps, topk, nodes)."""
    measured: dict[float, list[str]] = {}
    for row in record.get("measured", []):
        shapes = measured.setdefault(row["temperature"], [])
        if row["shape"] not in shapes:
            shapes.append(row["shape"])
    sentences = [
        f"T = {temperature:g}: {', '.join(f'`{shape}`' for shape in shapes)}"
        for temperature, shapes in sorted(measured.items())
    ]
    text = table(
        [*SERVING_COLUMNS, "tree / off", "tree / chain"],
        (
            [
                *(row.get(key) for key in SERVING_COLUMNS.values()),
                *(show_gain(row, other) for other in ("off", "chain")),
            ]
            for row in record["rows"]
        ),
    )
    if sentences:
        text += f"\n\nShapes measured in this run. {'; '.join(sentences)}."
    return text


def lengths_table(record: Record) -> str:
    """What speculation gains at each input length, over prompts that end alike."""
    greedy = [row for row in record["rows"] if row["temperature"] == 0]
    lengths = sorted({row["input_len"] for row in greedy})
    rows = {(row["batch"], row["input_len"]): row for row in greedy}

    def gain(batch: int, length: int) -> tuple[float, str]:
        row = rows[batch, length]
        names = {"chain": f"chain:{row['chain']}", "tree": f"tree:{row['tree']}"}
        best = max(names, key=lambda family: row[f"{family}_tok_s"])
        return row[f"{best}_tok_s"] / row["off_tok_s"], names[best]

    lines = []
    for batch in sorted({batch for batch, _ in rows}):
        gains = [gain(batch, length) for length in lengths]
        cells = [f"{times(value)} ({name})" for value, name in gains]
        lines.append([batch, *cells, times(gains[-1][0] / gains[0][0])])
    heads = [f"best / off at input {length}" for length in lengths]
    return table(["batch", *heads, "longest / shortest"], lines)


ROUNDING_COLUMNS = {
    "outputs": "outputs",
    "differ": "differ",
    "beyond the tolerance": "beyond",
    "largest gap": "largest",
}


def rounding_table(record: Record) -> str:
    """How far noise as large as rounding moves outputs without any trees."""
    return table(
        ["noise", *ROUNDING_COLUMNS],
        (
            [
                f"1 / {1 / row['noise']:.0f}",
                *(row[k] for k in ROUNDING_COLUMNS.values()),
            ]
            for row in record["rows"]
        ),
    )


LOAD_COLUMNS = {
    "input": "input_len",
    "batch": "batch",
    "off": "off",
    "best chain": "chain",
    "which": "chain_shape",
    "best tree": "tree",
    "which ": "tree_shape",
    "auto": "auto",
    "chose (N, S)": "auto_chose",
}


def load_table(record: Record) -> str:
    """Output tokens per second by load, and what auto used in most steps."""
    text = _loads(record["rows"], record["geometric_means"])
    if record.get("sampled"):
        sampled = _loads(record["sampled"], record["sampled_geometric_means"])
        text += f"\n\nSampled:\n\n{sampled}"
    return text


def _loads(rows: Sequence[Mapping[str, Any]], means: Mapping[str, float]) -> str:
    ratios = ("off", "best", "single")
    single = next((row["single_shape"] for row in rows if "single" in row), "-")
    columns = dict(LOAD_COLUMNS)
    if "temperature" in rows[0]:
        columns = {"T": "temperature", **columns}
    text = table(
        [
            *columns,
            "auto / off",
            "auto / best of the row",
            f"auto / {single.replace(':', ' ')}",
        ],
        (
            [
                *(row.get(key) for key in columns.values()),
                *(
                    times(row[f"auto_over_{name}"])
                    if f"auto_over_{name}" in row
                    else None
                    for name in ratios
                ),
            ]
            for row in sorted(
                rows,
                key=lambda r: (r.get("temperature"), r["input_len"], r["batch"]),
            )
        ),
    )
    shown = ", ".join(
        f"{name} {times(means[f'auto_over_{name}'])}"
        for name in ratios
        if f"auto_over_{name}" in means
    )
    return f"{text}\n\nGeometric means of the ratios of auto: over {shown}."


def budget_table(record: Record) -> str:
    """Accept length of equal trees and of one budget, a column for each N."""

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['equal']:.2f} / {row['shared']:.2f} ({times(row['gain'])})"

    return pivot(record["rows"], "nodes", "{nodes} nodes", cell, "batch")


RAMP_COLUMNS = {
    "second": "second",
    "requests": "concurrency",
    "text": "text",
    "off, tok/s": "off_tok_s",
    "auto, tok/s": "auto_tok_s",
    "auto accept length": "auto_accept_length",
}


def ramp_table(record: Record) -> str:
    """Tokens per second by window while load and text change."""

    def chose(row: Mapping[str, Any]) -> str:
        shares = row.get("auto_chose", [])
        return ", ".join(
            f"{n}{' shared' if drafts else ''} ({share:.0%})"
            for n, _, *drafts, share in shares
        )

    text = table(
        [*RAMP_COLUMNS, "auto / off", "nodes (share of steps)"],
        (
            [
                *(row.get(key) for key in RAMP_COLUMNS.values()),
                times(row["auto_over_off"]) if "auto_over_off" in row else None,
                chose(row),
            ]
            for row in record["rows"]
        ),
    )
    finished = ", ".join(
        f"{name} {count}" for name, count in record["finished"].items()
    )
    return (
        f"{text}\n\nWorst 10 seconds: {record['min_auto_over_off_10s']}x of off. "
        f"Requests finished: {finished}; failed: {record['failed']}."
    )


FRONTIER_SIZES = ((3, 3), (4, 4), (5, 3), (5, 5), (7, 4), (7, 6), (12, 6), (15, 6))
"""(N, S) that the table of frontiers shows."""


def frontier_table(record: Record) -> str:
    """Accept length by size and frontier."""
    found = by_size(record["rows"])
    widest = sorted({frontier for *_, frontier in found})
    errors = model_errors(record["rows"])
    mean = math.sqrt(sum(e * e for e in errors) / len(errors))
    worst = max(errors, key=abs)
    text = table(
        ["T", "nodes N", "depth S", *(f"F = {frontier}" for frontier in widest)],
        (
            [t, n, s, *(found.get((t, n, s, frontier)) for frontier in widest)]
            for t in sorted({temperature for temperature, *_ in found})
            for n, s in FRONTIER_SIZES
        ),
    )
    return (
        f"{text}\n\nFrom the accept length of one size of auto, of 3 nodes and more, "
        f"its model of the text tells that of another to {mean:.1%} (root mean square; "
        f"at worst {worst:+.1%})."
    )


def soak_table(record: Record) -> str:
    """What a server under mixed traffic came to."""
    first, last = record["tok_s_min_5_10"], record["tok_s_last_5"]
    rates = [row["tok_s"] for row in record["rows"]]
    memory = {
        name: f"{series[len(series) // 5]:g}, {series[-1]:g}"
        for name, series in (
            ("host", record["host_mib"]),
            ("device", record["device_mib"]),
        )
    }
    lines = [
        ("minutes", record["minutes"]),
        (
            "requests, of them aborted by the client",
            f"{record['requests']:,}, {record['aborted']:,}",
        ),
        ("failed", record["failed"]),
        ("preemptions", f"{record['preemptions']:,}"),
        ("uses of each KV block", f"{record['block_uses']:,}"),
        (
            "probes, of them not as the first",
            f"{record['probes']}, {record['probe_mismatches']}",
        ),
        (
            "tokens/s in minutes 5 to 10, in the last 5",
            f"{first:g}, {last:g} ({last / first - 1:+.1%})",
        ),
        (
            "tokens/s of half a minute, least to most",
            f"{min(rates):.0f} to {max(rates):.0f}",
        ),
        ("host memory after a fifth of the time, at the end, MiB", memory["host"]),
        ("device memory, the same, MiB", memory["device"]),
    ]
    return table(["", "found"], lines)


def gain(row: Mapping[str, Any], other: str) -> float | None:
    """Tokens per second of the best tree over ``other``'s; None: one is missing."""
    ours, theirs = row.get("tree_tok_s"), row.get(f"{other}_tok_s")
    return ours / theirs if ours and theirs else None


def show_gain(row: Mapping[str, Any], other: str) -> str | None:
    """``gain`` as ``1.23x``."""
    found = gain(row, other)
    return None if found is None else times(found)


# --- README: one table, and where it loses --------------------------------------------


COMPARED = {"off": "no speculation", "chain": "the best chain"}


def summarize_serving(record: Record | None) -> Rows:
    """A line for each temperature and input length."""
    if record is None:
        return [_missing("tokens per second", "by batch, against off and chains")]
    groups: dict[tuple[float, int], Rows] = {}
    for row in record["rows"]:
        groups.setdefault((row["temperature"], row["input_len"]), []).append(row)
    lines: Rows = []
    for (temperature, length), rows in groups.items():
        for other, words in COMPARED.items():
            gains = [(r["batch"], show_gain(r, other)) for r in rows]
            shown = ", ".join(f"{batch}: {found}" for batch, found in gains if found)
            lines.append(
                {
                    "figure": f"tokens/s of the best tree over {words}",
                    "setting": f"T = {temperature:g}, input {length}, by batch",
                    "measured": shown or NOT_MEASURED,
                }
            )
    return lines


def summarize_load(record: Record | None) -> Rows:
    """Auto against no speculation and against the fastest fixed choice, by batch."""
    if record is None:
        return [_missing("tokens per second of auto", "by batch and input")]
    lines: Rows = []
    words = {"off": "no speculation", "best": "the best fixed choice of each load"}
    for length in sorted({row["input_len"] for row in record["rows"]}):
        for other, against in words.items():
            shown = ", ".join(
                f"{row['batch']}: {times(row[f'auto_over_{other}'])}"
                for row in record["rows"]
                if row["input_len"] == length and f"auto_over_{other}" in row
            )
            lines.append(
                {
                    "figure": f"tokens/s of `auto` over {against}",
                    "setting": f"T = 0, input {length}, by batch",
                    "measured": shown or NOT_MEASURED,
                }
            )
    return lines


def summarize_acceptance(record: Record | None) -> Rows:
    """The best in-tree chain against the coupled tree of 7 nodes."""
    if record is None:
        return [_missing("accept length", "tiny model, chains and trees")]
    lines: Rows = []
    for temperature in sorted({row["temperature"] for row in record["rows"]}):
        rows = [row for row in record["rows"] if row["temperature"] == temperature]
        in_tree = ("chain_greedy", "chain_probabilistic")
        chains = [r["accept_length"] for r in rows if r["method"] in in_tree]
        trees = [
            r["accept_length"]
            for r in rows
            if r["method"] == "tree_coupled" and r["nodes"] == 7
        ]
        if not chains or not trees:
            continue
        chain, tree = max(chains), trees[0]
        lines.append(
            {
                "figure": "accept length: vLLM's chain of 3, tree of 7 nodes",
                "setting": f"tiny model, T = {temperature:g}",
                "measured": f"{chain:g}, {tree:g} ({times(tree / chain)})",
            }
        )
    return lines


SHOWN_ATTENTION = ((1, 12288), (16, 12288), (64, 4096))
"""(batch, context) of the README's rows."""


def summarize_attention(record: Record | None) -> Rows:
    """Eight rows at long context: against FA3's causal pass, and against one row."""
    if record is None:
        return [_missing("tree attention", "8 rows a request against FA3 causal")]
    lines: Rows = []
    for row in record["rows"]:
        if row["rows"] != 8 or (row["batch"], row["context"]) not in SHOWN_ATTENTION:
            continue
        ratio = times(row["ours_us"] / row["fa3_chain_us"])
        lines.append(
            {
                "figure": "tree attention of 8 rows, FA3 chain of 8 rows",
                "setting": f"batch {row['batch']}, context {row['context']}, "
                f"{row['heads']} heads",
                "measured": f"{row['ours_us']:g} µs, {row['fa3_chain_us']:g} µs "
                f"({ratio})",
            }
        )
    return lines


def summarize_bookkeeping(record: Record | None) -> Rows:
    """Everything of a step that is neither a model pass nor attention."""
    if record is None:
        return [_missing("tree bookkeeping of a step", "every kernel, under replay")]
    found = {(row["what"], row["batch"]): row["us"] for row in record["rows"]}
    parts = {
        "T = 0": [(b, found.get(("step", b))) for b in (1, 16, 64)],
        "T = 1": [(b, found.get(("step_sampled", b))) for b in (1, 16, 64)],
    }
    return [
        {
            "figure": "tree bookkeeping of a step, all kernels",
            "setting": f"vocabulary 129,280, 61 layers, {name}, by batch",
            "measured": ", ".join(f"{b}: {us:g} µs" for b, us in values if us),
        }
        for name, values in parts.items()
    ]


def _missing(figure: str, setting: str) -> dict[str, Any]:
    return {"figure": figure, "setting": setting, "measured": NOT_MEASURED}


def summary() -> str:
    """The one results table of the README."""
    lines = [
        *summarize_serving(read_record("serving_h200")),
        *summarize_load(read_record("load_h200")),
        *summarize_acceptance(read_record("acceptance")),
        *summarize_attention(read_record("attention_h200")),
        *summarize_bookkeeping(read_record("bookkeeping_h200")),
    ]
    keys = ("figure", "setting", "measured")
    return table(keys, ([line[key] for key in keys] for line in lines))


def losses() -> str:
    """Where the measurements say that trees lose, in bullets."""
    found = [
        *serving_losses(read_record("serving_h200")),
        *attention_losses(read_record("attention_h200")),
        *acceptance_losses(read_record("acceptance")),
        *bookkeeping_losses(read_record("bookkeeping_h200")),
    ]
    return "\n".join(f"- {line}" for line in found)


def serving_losses(record: Record | None) -> list[str]:
    """Rows in which even the best tree is slower than something else."""
    if record is None:
        return [f"Tokens per second by load: {NOT_MEASURED}."]
    lines = []
    for other, words in COMPARED.items():
        gains = [(r, found) for r in record["rows"] if (found := gain(r, other))]
        lost = [(row, found) for row, found in gains if found < 1]
        where = "; ".join(
            f"batch {row['batch']}, input {row['input_len']}, "
            f"T = {row['temperature']:g}: {times(found)}"
            for row, found in lost
        )
        lines.append(
            f"The best tree is slower than {words} in {len(lost)} of {len(gains)} "
            f"settings{': ' + where if lost else ''}."
        )
    return lines


def attention_losses(record: Record | None) -> list[str]:
    """The worst ratio to a causal pass, and what width costs."""
    if record is None:
        return [f"Attention of tree rows against chain rows: {NOT_MEASURED}."]
    rows = [row for row in record["rows"] if row["rows"] > 1]
    worst = max(rows, key=lambda row: row["ours_us"] / row["fa3_chain_us"])
    ratio = times(worst["ours_us"] / worst["fa3_chain_us"])
    lines = [
        f"Tree attention costs up to {ratio} the causal pass over the same rows "
        f"(batch {worst['batch']}, context {worst['context']}, {worst['heads']} heads, "
        f"{worst['rows']} rows)."
    ]
    eight = [r for r in rows if r["rows"] == 8 and r.get("one_row_us")]
    if eight:
        worst = max(eight, key=lambda row: row["ours_us"] / row["one_row_us"])
        ratio = times(worst["ours_us"] / worst["one_row_us"])
        lines.append(
            f"Eight rows cost up to {ratio} the attention of one row (batch "
            f"{worst['batch']}, context {worst['context']}, {worst['heads']} heads)."
        )
    return lines


def acceptance_losses(record: Record | None) -> list[str]:
    """Where a coupled chain accepts less than the ratio test."""
    if record is None:
        return [f"Coupled chains against vLLM's ratio test: {NOT_MEASURED}."]
    found = {(r["method"], r["temperature"]): r for r in record["rows"]}
    lines = []
    for (method, temperature), row in found.items():
        other = found.get(("chain_probabilistic", temperature))
        if method != "chain_coupled" or other is None:
            continue
        if row["accept_length"] < other["accept_length"]:
            lines.append(
                f"At T = {temperature:g} a chain drafted with the target's noise has "
                f"accept length {row['accept_length']:g}; vLLM's ratio test with "
                f"sampled drafts has {other['accept_length']:g}."
            )
    return lines


def bookkeeping_losses(record: Record | None) -> list[str]:
    """Time that decoding without trees does not spend."""
    if record is None:
        return [f"Bookkeeping of a step: {NOT_MEASURED}."]
    found = {(row["what"], row["batch"]): row["us"] for row in record["rows"]}
    batch = max(b for what, b in found if what == "step_sampled")
    greedy, sampled = found["step", batch], found["step_sampled", batch]
    return [
        f"Bookkeeping of a step takes {greedy:g} µs at batch {batch} and T = 0, "
        f"{sampled:g} µs at T = 1, where candidates are ranked with noise over the "
        "whole vocabulary. Decoding without trees spends none of it."
    ]


# --- code -----------------------------------------------------------------------------


def feature_table() -> str:
    """``vllm_mtp.features.FEATURES`` as Markdown."""
    from vllm_mtp.features import FEATURES

    return table(
        ["request feature", "drafts", "why"],
        ([f.name, f.served_by.value, f.why] for f in FEATURES),
    )


def example_tree() -> str:
    """``vllm_mtp.tree.layout.EXAMPLE`` drawn, and each of its tensors."""
    from vllm_mtp.tree.layout import EXAMPLE

    num_rows = len(EXAMPLE.tokens)
    children: dict[int, list[int]] = {row: [] for row in range(num_rows)}
    for row, parent in enumerate(EXAMPLE.parents[1:], start=1):
        children[parent].append(row)

    def draw(row: int, indent: str) -> Iterable[str]:
        for child in children[row]:
            last = child == children[row][-1]
            label = f"row {child}  token {EXAMPLE.tokens[child]}"
            yield f"{indent}{'└──' if last else '├──'} {label}"
            yield from draw(child, indent + ("    " if last else "│   "))

    lines = [f"row 0  token {EXAMPLE.tokens[0]}  (root)", *draw(0, "")]
    width = max(len(str(value)) for value in (*EXAMPLE.tokens, *EXAMPLE.masks))
    tensors = [("row", range(num_rows))]
    tensors += [
        (name, getattr(EXAMPLE, name))
        for name in ("tokens", "parents", "depths", "masks")
    ]
    printed = [
        f"{name:8}" + "".join(f"  {value:>{width}}" for value in values)
        for name, values in tensors
    ]
    attends = [
        f"row {row}: {mask:0{num_rows}b}  attends to rows "
        + ", ".join(str(j) for j in range(num_rows) if mask >> j & 1)
        for row, mask in enumerate(EXAMPLE.masks)
    ]
    blocks = (lines, printed, attends)
    return "\n\n".join("```text\n" + "\n".join(block) + "\n```" for block in blocks)


def module_table() -> str:
    """One line per module: the first sentence of its docstring."""
    rows = []
    for path in sorted((ROOT / "vllm_mtp").rglob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text("utf-8")))
        if doc is None:
            continue
        first = " ".join(doc.split("\n\n")[0].split())
        first = re.split(r"(?<=[a-z`)])\.\s", first)[0].rstrip(".")
        name = path.relative_to(ROOT).as_posix()
        rows.append([f"[`{name}`](../{name})", first.replace("``", "`")])
    return table(["module", "what it is"], rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "results:summary": summary,
    "results:losses": losses,
    "results:serving": lambda: section("serving_h200", serving_table),
    "results:rounding": lambda: section("rounding", rounding_table),
    "results:gains": lambda: section("serving_h200", lengths_table),
    "results:lengths": lambda: section("serving_lengths_h200", lengths_table),
    "results:load": lambda: section("load_h200", load_table),
    "results:shared_budget": lambda: section("shared_budget", budget_table),
    "results:experts": lambda: section("experts", experts_table),
    "results:ramp": lambda: section("ramp_h200", ramp_table),
    "results:soak": lambda: section("soak_h200", soak_table),
    "results:frontier": lambda: section("frontier", frontier_table),
    "results:acceptance": lambda: section("acceptance", acceptance_table),
    "results:acceptance_cpu": lambda: section("acceptance_cpu", acceptance_table),
    "results:calibration": lambda: section("calibration", calibration_table),
    "results:attention": lambda: section("attention_h200", attention_table),
    "results:bookkeeping": lambda: section("bookkeeping_h200", bookkeeping_table),
    "code:features": feature_table,
    "code:example": example_tree,
    "code:modules": module_table,
}


def fill(text: str) -> str:
    """A document with every generated section made anew.

    Raises:
        KeyError: a marker names a section that there is not.
    """

    def replace(match: re.Match[str]) -> str:
        kind, name = match.groups()
        body = SECTIONS[f"{kind}:{name}"]()
        return f"<!-- {kind}:{name} -->\n{body}\n<!-- /{kind} -->"

    return MARKER.sub(replace, text)


def outdated() -> dict[Path, str]:
    """Documents whose sections differ from what they should be -> their new text."""
    found = {}
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        filled = fill(text)
        if filled != text:
            found[path] = filled
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    changed = outdated()
    for path, text in changed.items():
        print(path.relative_to(ROOT))
        if not args.check:
            path.write_text(text, "utf-8")
    if args.check and changed:
        sys.exit("out of date; run: python -m benchmarks.report")


if __name__ == "__main__":
    main()
