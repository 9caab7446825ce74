"""From all measurements to one row per temperature, batch and input length.

python -m benchmarks.serving.report OUT PART...   # records, the newest last
python -m benchmarks.serving.report OUT --loads benchmarks/results/load_h200.json
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
KEYS = ("temperature", "input_len", "batch")
AUTO = ("auto", "shared")


def summarize(measured: Sequence[Row]) -> list[Row]:
    """No speculation, the best in-tree chain and the best tree, side by side.

    Trees of one branch are ``mtp_tree`` chains and count as trees.

    A row: ``temperature``, ``input_len``, ``batch``, ``off_tok_s``, ``chain_tok_s``,
    ``chain``, ``chain_accept_length``, ``tree_tok_s``, ``tree``,
    ``tree_accept_length``, ``tree_over_off``, ``tree_over_chain``, ``auto_tok_s`` and
    ``auto_chose``, ``shared_tok_s`` and ``shared_chose``. What was not measured is left
    out.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in measured:
        groups.setdefault(tuple(row[key] for key in KEYS), []).append(row)
    summary = []
    for key, rows in sorted(groups.items()):
        line: Row = dict(zip(KEYS, key, strict=True))
        for family in ("off", "chain", "tree"):
            ours = [row for row in rows if row["family"] == family]
            if not ours:
                continue
            best = max(ours, key=lambda row: row["tok_s"])
            line[f"{family}_tok_s"] = best["tok_s"]
            if family != "off":
                line[family] = best["shape"].split(":", 1)[1]
                line[f"{family}_accept_length"] = best["accept_length"]
        for row in rows:
            if (name := row["family"]) in AUTO:
                line[f"{name}_tok_s"] = row["tok_s"]
                line[f"{name}_chose"] = row["chose"]
        for other in ("off", "chain"):
            if "tree_tok_s" in line and f"{other}_tok_s" in line:
                ratio = line["tree_tok_s"] / line[f"{other}_tok_s"]
                line[f"tree_over_{other}"] = round(ratio, 3)
        summary.append(line)
    return summary


def compare_loads(measured: Sequence[Row], sampled: bool = False) -> list[Row]:
    """Tokens/s by load, greedy or sampled: ``off``, the best of a family, ``auto``.

    A row: ``batch``, ``input_len``, ``temperature`` where it is sampled, ``off``,
    ``chain`` and ``chain_shape``, ``tree`` and ``tree_shape`` (the best at this load),
    ``single`` and ``single_shape`` (the one fixed shape whose geometric mean over all
    loads is best), ``auto``, ``auto_chose``, ``shared`` and ``shared_chose`` (auto
    with ``share_nodes``),
    and the ratios ``auto_over_off``, ``auto_over_best`` (the fastest fixed choice of
    the row, ``off`` among them) and ``auto_over_single``.
    """
    loads: dict[tuple[float, ...], list[Row]] = {}
    for row in measured:
        if (row["temperature"] > 0) is sampled:
            key = tuple(row[name] for name in ("batch", "input_len", "temperature"))
            loads.setdefault(key, []).append(row)
    single = best_single(list(loads.values()))
    return [_compare_load(rows, single) for _, rows in sorted(loads.items())]


def best_single(loads: Sequence[Sequence[Row]]) -> str | None:
    """The fixed shape, measured at every load, of the best geometric mean."""
    rates: dict[str, list[float]] = {}
    for row in (row for rows in loads for row in rows if row["family"] not in AUTO):
        rates.setdefault(row["shape"], []).append(row["tok_s"])
    whole = [shape for shape, found in rates.items() if len(found) == len(loads)]
    mean = statistics.geometric_mean
    return max(whole, key=lambda shape: mean(rates[shape]), default=None)


def _compare_load(rows: Sequence[Row], single: str | None) -> Row:
    line: Row = {name: rows[0][name] for name in ("batch", "input_len", "temperature")}
    if not line["temperature"]:
        del line["temperature"]
    for family in ("off", "chain", "tree", *AUTO):
        ours = [row for row in rows if row["family"] == family]
        if not ours:
            continue
        best = max(ours, key=lambda row: row["tok_s"])
        line[family] = best["tok_s"]
        if family in ("chain", "tree"):
            line[f"{family}_shape"] = best["shape"]
        if family in AUTO:
            line[f"{family}_chose"] = best["chose"]
    for row in rows:
        if row["shape"] == single:
            line |= {"single": row["tok_s"], "single_shape": single}
    fixed = [line[family] for family in ("off", "chain", "tree") if family in line]
    against = {"off": line.get("off"), "single": line.get("single")}
    against["best"] = max(fixed, default=None)
    for ours in (name for name in AUTO if name in line):
        for name, rate in against.items():
            if rate:
                line[f"{ours}_over_{name}"] = round(line[ours] / rate, 3)
    return line


def mean_ratios(rows: Sequence[Row]) -> Row:
    """Geometric mean over the loads of each ratio of ``compare_loads``."""
    names = [f"{ours}_over_{n}" for ours in AUTO for n in ("off", "best", "single")]
    found = {n: [row[n] for row in rows if n in row] for n in names}
    return {n: round(statistics.geometric_mean(v), 3) for n, v in found.items() if v}


def merge(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """All rows, the newer one where both have measured the same."""
    rows = {(row["shape"], *(row[key] for key in KEYS)): row for row in [*old, *new]}
    return list(rows.values())


def format_table(summary: Sequence[Row]) -> str:
    """The summary as text, one line a row."""
    lines = [
        f"{'T':>4} {'input':>6} {'batch':>5} {'off':>8} {'chain':>8} {'(N)':<16} "
        f"{'tree':>8} {'(S,k,N,F)':<9} {'accept':>11} {'/off':>6} {'/chain':>6}"
    ]
    for row in summary:
        accept = [row.get(f"{f}_accept_length", 0.0) for f in ("chain", "tree")]
        lines.append(
            f"{row['temperature']:>4} {row['input_len']:>6} {row['batch']:>5} "
            f"{row.get('off_tok_s', 0):>8.0f} {row.get('chain_tok_s', 0):>8.0f} "
            f"{row.get('chain', '-'):<16} {row.get('tree_tok_s', 0):>8.0f} "
            f"{row.get('tree', '-'):<9} {accept[0]:>5.2f} {accept[1]:>5.2f} "
            f"{row.get('tree_over_off', 0):>6.2f} {row.get('tree_over_chain', 0):>6.2f}"
        )
    return "\n".join(lines)


def join(records: Sequence[Row]) -> Row:
    """One record of several, the newest last: its provenance, everybody's measurements.

    ``others`` says which measurements are of another commit.
    """
    joined = dict(records[-1])
    records = [stamp(record, joined["commit"]) for record in records]
    commands = dict.fromkeys(record["command"] for record in records)
    joined["command"] = " && ".join(commands)
    for name in ("engines", "profile"):
        joined[name] = {k: v for record in records for k, v in record[name].items()}
    joined["proof"] = next((r["proof"] for r in records if r["proof"]), None)
    joined["measured"] = merge([], [m for r in records for m in r["measured"]])
    joined["others"] = list_others(joined["measured"])
    # Last, as in every record.
    del joined["rows"]
    return {**joined, "rows": summarize(joined["measured"])}


def stamp(record: Row, commit: str) -> Row:
    """The record to be kept in one of ``commit``: what is of another has its own."""
    if record["commit"] == commit:
        return record
    was = {"commit": record["commit"]}
    engines = {name: {**was, **times} for name, times in record["engines"].items()}
    measured = [{**was, **row} for row in record["measured"]]
    return {**record, "engines": engines, "measured": measured}


def list_others(measured: Sequence[Row]) -> list[Row]:
    """By commit, which points are not of the record's own."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for row in measured:
        if "commit" in row:
            key = row["commit"], row["temperature"], row["input_len"]
            shapes = found.setdefault(key, [])
            if row["shape"] not in shapes:
                shapes.append(row["shape"])
    names = ("commit", "temperature", "input_len")
    return [
        {**dict(zip(names, key, strict=True)), "shapes": shapes}
        for key, shapes in sorted(found.items())
    ]


def main() -> None:
    """Join records, show the table, write the comparison by load."""
    parser = argparse.ArgumentParser(description="Join and show serving records.")
    parser.add_argument("out", type=Path, help="record; written if there are parts")
    parser.add_argument("parts", type=Path, nargs="*", help="records to join")
    parser.add_argument("--loads", type=Path, help="write greedy tokens/s by load")
    args = parser.parse_args()
    paths = args.parts or [args.out]
    record = join([json.loads(path.read_text()) for path in paths])
    if args.parts:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(format_table(record["rows"]))
    if args.loads:
        rows = compare_loads(record["measured"])
        sampled = compare_loads(record["measured"], sampled=True)
        names = ("command", "commit", "versions", "gpu", "others")
        loads = {key: record[key] for key in names}
        loads |= {
            "sampled_geometric_means": mean_ratios(sampled),
            "sampled": sampled,
            "geometric_means": mean_ratios(rows),
            "rows": rows,
        }
        args.loads.write_text(json.dumps(loads, indent=1) + "\n")


if __name__ == "__main__":
    main()
