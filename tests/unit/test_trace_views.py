"""Figures, terminal drawing and page data of a trace."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.helpers.traces import HOSTILE, make_step, make_steps, plain_step, write_trace
from vllm_mtp.trace.draw import draw_step, draw_tree, percent, printable
from vllm_mtp.trace.load import load_trace
from vllm_mtp.trace.page import render_page, safe_json
from vllm_mtp.trace.schema import Header, Step, Trace
from vllm_mtp.trace.stats import summarize
from vllm_mtp.tree.layout import EXAMPLE


def render(tree: object) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(tree)
    return capture.get()


def test_figures_are_what_counting_gives() -> None:
    steps = make_steps(60, ("a", "b"), plain_every=5)
    summary = summarize(steps)
    drafted = [s for s in steps if len(s.tokens) > 1]
    assert summary.steps == 120
    assert summary.steps_without_drafts == 120 - len(drafted) == 24
    assert summary.nodes == 7 * len(drafted)
    assert summary.emitted == sum(len(s.emitted) for s in steps)
    accepted = sum(len(s.emitted) - 1 for s in drafted)
    assert summary.mean_accept_length == 1 + accepted / len(drafted)
    for depth in (1, 2, 3):
        count = sum(len(s.emitted) > depth for s in drafted)
        assert summary.accepted_per_depth[depth - 1] == count
    assert sum(summary.accepted_per_depth) == summary.accepted == accepted


def test_foreseen_acceptance_matches_a_calibrated_drafter() -> None:
    """The synthetic target draws with the drafter's probabilities."""
    summary = summarize(make_steps(3000))
    assert summary.predicted_accept_length == pytest.approx(
        summary.mean_accept_length, abs=0.06
    )


@pytest.mark.parametrize("steps", [[], [plain_step(make_step(random.Random(0)))]])
def test_no_drafts_gives_no_ratio_instead_of_nan(steps: list[Step]) -> None:
    figures = summarize(steps).to_dict()
    assert figures["mean_accept_length"] is None
    assert figures["nodes_per_step"] is None
    assert figures["acceptance_per_depth"] == ()
    assert "NaN" not in json.dumps(figures)


def test_example_tree_is_drawn() -> None:
    scores = [0.0, -0.1, -1.2, -0.3, -1.6, -1.7, -0.5]
    names = ["root", "a", "b", "d", "e", "f", "g"]
    text = render(
        draw_tree(EXAMPLE.tokens, EXAMPLE.parents, scores, [0, 1, 3], names, 7, "x")
    )
    assert text.splitlines() == [
        "root  root",
        "├── a  90%  accepted",
        "│   ├── d  82% / 74%  accepted",
        "│   │   ├── g  82% / 61%",
        "│   │   └── x  drawn by the target",
        "│   └── e  22% / 20%",
        "└── b  30%",
        "    └── f  61% / 18%",
    ]


def test_padding_is_not_drawn_and_ids_stand_in_for_text() -> None:
    text = render(draw_tree([5, 6, 7], [-1, 0, -1], [0.0, -1.0, None], [0]))
    assert text.splitlines() == ["5  root", "└── 6  37%"]


def test_nothing_in_a_token_can_reach_the_terminal() -> None:
    seen = ""
    for seed in range(30):
        text = render(draw_step(make_step(random.Random(seed), texts=HOSTILE)))
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u2028\u2029\u202e\u0301]", text)
        seen += text
    assert "[red]markup[/red]" in seen
    assert printable("\x1b]0;x\x07 \n") == "\\x1b]0;x\\x07·\\n"
    assert printable("é中🙂") == "é中🙂"


def test_percentages() -> None:
    assert [percent(p) for p in (0.0, 1e-9, -0.1, -3.0, -30.0)] == [
        "100%",
        "100%",
        "90%",
        "5.0%",
        "0.0%",
    ]


def test_page_holds_the_data_and_nothing_executable_of_it(tmp_path: Path) -> None:
    steps = make_steps(30, (HOSTILE[0], "__DATA__"), texts=HOSTILE)
    trace = load_trace(write_trace(tmp_path / "t.jsonl", steps, model=HOSTILE[0]))
    page = render_page(trace, trace.steps)
    # The template's own elements and no others.
    tags = re.findall("<(/?[a-zA-Z!][a-z]*)", page)
    assert tags.count("script") == tags.count("/script") == 2
    assert "img" not in tags
    assert not re.search(r"(src|href)\s*=", page.replace("img src=", ""))
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    block = re.search('type="application/json" id="data">(.*?)</script>', page, re.S)
    assert block
    data = json.loads(block[1])
    assert data["requests"] == [HOSTILE[0], "__DATA__"]
    assert len(data["steps"]) == 60
    assert {int(k): v for k, v in data["texts"].items()} == dict(enumerate(HOSTILE))


def test_policy_forbids_all_but_the_two_hashes() -> None:
    page = render_page(Trace(Header("r", 0.0, "m", {}, {}), ()), ())
    policy = re.search('Content-Security-Policy" content="(.*?)"', page)
    assert policy
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[^']+'; script-src 'sha256-[^']+'; "
        "base-uri 'none'; form-action 'none'",
        policy[1],
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_safe_json_reads_back_and_holds_no_markup(text: str) -> None:
    safe = safe_json({text: text})
    assert json.loads(safe) == {text: text}
    assert not set(safe) & set("<>&\u2028\u2029")


def test_drawing_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, vllm_mtp.trace.draw, vllm_mtp.trace.writer, vllm_mtp.trace.page;"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr
