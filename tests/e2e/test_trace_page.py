"""The trace page in a real browser: it shows the trees, and nothing breaks out."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.browser import Page, find_chromium
from tests.helpers.traces import HOSTILE, make_steps, write_trace
from vllm_mtp.trace.load import load_trace
from vllm_mtp.trace.page import write_page
from vllm_mtp.trace.schema import Step
from vllm_mtp.trace.stats import summarize

pytestmark = pytest.mark.skipif(
    find_chromium() is None,
    reason="no Chromium or Chrome found (Debian: apt-get install chromium)",
)

ATTACK = "</script><img src='https://example.org/x' onerror='window.hacked=1'>"
TEXTS = (*HOSTILE, ATTACK, " plain", "\u4e2d\u6587", "")


STEP_THROUGH = """
for (let i = 0; i < {}; i++) {{
  s += ["tree", "body", "text", "node", "why"].map((id) => $(id).textContent).join("");
  document.body.dispatchEvent(
    new KeyboardEvent("keydown", {{ key: "ArrowRight", bubbles: true }}));
}}
return s;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with Page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(autouse=True)
def quiet(page: Page) -> Iterator[None]:
    """Every test ends without errors, logs, dialogs or requests but for the file."""
    page.problems.clear()
    page.requests.clear()
    yield
    page.evaluate("1")
    assert page.problems == []
    assert all(url.startswith("file:///") for url in page.requests), page.requests
    assert len(page.requests) == 1


def show(page: Page, folder: Path, steps: list[Step], model: str = "tiny") -> None:
    """Write the page of a trace the way the command does, and open it."""
    trace = load_trace(write_trace(folder / "t.jsonl", steps, model))
    write_page(trace, trace.steps, folder / "t.html")
    page.open((folder / "t.html").as_uri())


def shown_rows(page: Page, kind: str) -> list[int]:
    """Rows of the drawn nodes of a kind, in row order; -1 is the target's draw."""
    found = page.evaluate(
        f"[...document.querySelectorAll('#tree .node{kind}')].map(g => g.dataset.row)"
    )
    return sorted(int(row) for row in found)


def check_step(page: Page, step: Step) -> None:
    """What is drawn is the tree of this step."""
    real = [0] + [r for r in range(1, len(step.tokens)) if step.parents[r] >= 0]
    assert shown_rows(page, "") == [-1, *real]
    assert shown_rows(page, ".accepted") == sorted(step.path)
    assert shown_rows(page, ".extra") == [-1]
    places = page.evaluate(
        "[...document.querySelectorAll('#tree .node')].map(g => [+g.dataset.row,"
        "g.transform.baseVal[0].matrix.e, g.transform.baseVal[0].matrix.f])"
    )
    columns = {step.depths[row]: x for row, x, _ in places if row >= 0}
    assert len(set(columns.values())) == len(columns)
    assert all(x == columns[step.depths[row]] for row, x, _ in places if row >= 0)
    for x in {x for _, x, _ in places}:
        heights = sorted(y for _, other, y in places if other == x)
        # A node is 42 high.
        assert all(b - a > 42 for a, b in itertools.pairwise(heights))
    edges = page.evaluate("document.querySelectorAll('#tree .edge.accepted').length")
    assert edges == len(step.path) - 1
    facts = page.evaluate("document.getElementById('facts').textContent")
    assert facts.startswith(f"Verify pass {step.step}, position {step.position},")
    assert f"accept length {len(step.path)}" in facts
    assert page.evaluate("document.querySelectorAll('#body tr').length") == len(real)


def test_keyboard_steps_through_the_trees(page: Page, tmp_path: Path) -> None:
    steps = make_steps(30, ("a", "b"), (4, 3, 12), plain_every=7)
    first, second = steps[0::2], steps[1::2]
    show(page, tmp_path, steps)
    check_step(page, first[0])
    for key, index in [
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("PageDown", 12),
        ("ArrowLeft", 11),
        ("PageUp", 1),
        ("End", 29),
        ("ArrowRight", 29),
        ("Home", 0),
        ("ArrowLeft", 0),
        ("PageDown", 10),
    ]:
        page.press(key)
        check_step(page, first[index])
    page.press("]")
    check_step(page, second[0])
    for _ in range(6):
        page.press("ArrowRight")
    check_step(page, second[6])
    assert second[6].num_nodes == 0
    page.press("[")
    check_step(page, first[0])


def test_node_is_explained(page: Page, tmp_path: Path) -> None:
    steps = make_steps(1, shape=(3, 4, 7), seed=3)
    (step,) = steps
    rejected = next(r for r in range(1, 8) if r not in step.path)
    show(page, tmp_path, steps)
    page.click(f"#tree .node[data-row='{rejected}']")
    assert shown_rows(page, ".selected") == [rejected]
    why = page.evaluate("document.getElementById('why').textContent")
    assert why.startswith("Not accepted")
    details = page.evaluate("document.getElementById('node').textContent")
    assert f"({step.tokens[rejected]})" in details
    assert f"row{rejected}, depth {step.depths[rejected]}" in details
    page.press("Home")
    selected = set()
    for _ in range(9):
        page.press("ArrowUp")
    for _ in range(9):
        selected.update(shown_rows(page, ".selected"))
        page.press("ArrowDown")
    assert selected == {-1, *range(8)}


def test_charts_show_the_figures(page: Page, tmp_path: Path) -> None:
    steps = make_steps(50, plain_every=9)
    summary = summarize(steps)
    show(page, tmp_path, steps)
    cards = page.evaluate(
        "[...document.querySelectorAll('.card b')].map(b => b.textContent)"
    )
    assert cards == [
        f"{summary.mean_accept_length:.2f}",
        f"{summary.predicted_accept_length:.2f}",
        str(summary.drafted_steps),
        str(summary.steps_without_drafts),
        f"{summary.nodes_per_step:.1f}",
        str(summary.emitted),
    ]
    shares = page.evaluate(
        "[...document.querySelectorAll('#depths .gain')].map(r => +r.dataset.share)"
    )
    assert shares == pytest.approx(summary.acceptance_per_depth, abs=1e-4)
    bars = page.evaluate(
        "['base', 'gain', 'none'].map(c => document.querySelector('#timeline .' + c)"
        ".getAttribute('d').split('M').length - 1)"
    )
    gained = sum(step.num_accepted > 0 for step in steps)
    assert bars == [summary.drafted_steps, gained, summary.steps_without_drafts]
    page.click("#timeline")
    assert page.evaluate("document.getElementById('number').value") in ("25", "26")


def test_hostile_text_stays_text(page: Page, tmp_path: Path) -> None:
    steps = make_steps(40, (ATTACK, "constructor", "__proto__"), texts=TEXTS)
    show(page, tmp_path, steps, model=ATTACK)
    before = page.evaluate("document.querySelectorAll('*').length")
    assert before > 100
    seen = ""
    for _ in range(3):
        page.press("Home")
        seen += page.evaluate(f"(() => {{ let s = ''; {STEP_THROUGH.format(40)} }})()")
        page.press("]")
    assert ATTACK.replace(" ", "\u00b7") in seen
    assert not any(char in seen for char in "\u202e\u2028\x1b\x00")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img, iframe, link').length") == 0
    assert page.evaluate("document.scripts.length") == 2
    assert ATTACK in page.evaluate("document.title")


def test_policy_stops_what_should_slip_through(page: Page, tmp_path: Path) -> None:
    """The second line of defence: markup that got in would load and run nothing."""
    show(page, tmp_path, make_steps(2))
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', "
        '\'<img src="file:///etc/hostname" onerror="window.hacked=1">\''
        '+ \'<p style="color:red" onclick="window.hacked=1" id="bad">x</p>\')'
    )
    page.evaluate("document.getElementById('bad').click()")
    time.sleep(0.2)
    assert page.evaluate("window.hacked") is None
    blocked = [p for p in page.problems if "Content Security Policy" in p]
    assert len(blocked) >= 2
    page.problems.clear()
    del page.requests[1:]


def test_two_thousand_steps_stay_quick(page: Page, tmp_path: Path) -> None:
    steps = make_steps(2000, shape=(4, 4, 12))
    show(page, tmp_path, steps)
    milliseconds = page.evaluate(
        "(() => { const t = performance.now(); let s = '';"
        f"const f = () => {{ {STEP_THROUGH.format(50)} }}; f();"
        "return performance.now() - t; })()"
    )
    # About 15 ms a step on an idle core; loose, since test machines are not idle.
    assert milliseconds / 50 < 250
    page.press("End")
    check_step(page, steps[-1])
    marker, width = page.evaluate(
        "[document.getElementById('marker').getBoundingClientRect().right,"
        "document.getElementById('scroll').getBoundingClientRect().right]"
    )
    assert marker <= width + 8


def test_theme_and_help_have_keys(page: Page, tmp_path: Path) -> None:
    steps = make_steps(20, ("a", "b"))
    show(page, tmp_path, steps)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.press("]")
    page.press("End")
    page.wait("location.hash === '#request=1&step=19'")
    page.press("?")
    assert page.evaluate("document.getElementById('keys').open") is True


def test_link_opens_its_step(page: Page, tmp_path: Path) -> None:
    steps = make_steps(20, ("a", "b"))
    trace = load_trace(write_trace(tmp_path / "t.jsonl", steps))
    write_page(trace, trace.steps, tmp_path / "t.html")
    page.open((tmp_path / "t.html").as_uri() + "#request=1&step=7")
    check_step(page, steps[15])


def test_empty_trace_says_so(page: Page, tmp_path: Path) -> None:
    show(page, tmp_path, [])
    page.press("ArrowRight")
    page.press("]")
    facts = page.evaluate("document.getElementById('facts').textContent")
    assert facts == "The trace holds no steps."
