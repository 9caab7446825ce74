"""The Grafana dashboard asks only for metrics that exist, by their real labels."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_mtp.config import MTPConfig
from vllm_mtp.metrics.counts import PREFIX, totals

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "examples" / "grafana_dashboard.json").read_text()
)
QUERIES = {
    f"{panel['id']}{target['refId']}: {panel['title']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}
# What a Prometheus client appends to the name of a counter or histogram.
SUFFIX = re.compile("_(total|count|sum|bucket)$")


TOTALS = totals(MTPConfig(timing=True))


@pytest.fixture(scope="module")
def known_metrics() -> set[str]:
    """Ours, and the names in vLLM's source, which is read and not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    root = Path(spec.submodule_search_locations[0]) / "v1"
    text = "".join(
        path.read_text()
        for folder in ("metrics", "spec_decode")
        for path in (root / folder).glob("*.py")
    )
    return {PREFIX + name for name in TOTALS} | set(re.findall(r'"(vllm:\w+)"', text))


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_query_uses_metrics_that_exist(query: str, known_metrics: set[str]) -> None:
    names = set(re.findall(r"vllm:\w+", query))
    assert names
    assert {SUFFIX.sub("", name) for name in names} <= known_metrics
    assert query.count("(") == query.count(")")
    # Without its own brackets it takes the operand's for a list of labels.
    assert not re.search(r"group_left \((?!\))", query)
    assert query.count("model_name=~") == len(re.findall(r"vllm:\w+", query))


def test_every_total_is_drawn() -> None:
    for name, total in TOTALS.items():
        using = [q for q in QUERIES.values() if f"{PREFIX}{name}_total" in q]
        assert using, name
        assert total.label is None or any(f", {total.label})" in q for q in using)


def test_what_must_be_seen_is_there() -> None:
    titles = {panel["title"] for panel in DASHBOARD["panels"]}
    assert {
        "Mean accept length",
        "Accepted by depth",
        "Nodes verified per step",
        "Share of steps without drafts",
    } <= titles
    accept = next(q for name, q in QUERIES.items() if "accept length" in name)
    assert accept.startswith("1 + ")
    assert "num_accepted_tokens_total" in accept.split("/")[0]
    assert "num_drafts_total" in accept.split("/")[1]


def test_panels_neither_overlap_nor_share_an_id() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in places
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
