"""Regenerates what the documents show of real runs: ``make captures``.

Runs the demo and a traced batch on the embedded model, fills the parts between
``<!-- capture:NAME -->`` marks, and takes the picture of the page if there is a
Chromium. Times differ from run to run; trees and accept lengths do not, on one kind
of CPU.
"""

import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = re.compile(
    r"(?<=<!-- capture:)(?P<name>\w+)(?P<open> -->\n```text\n).*?"
    r"(?=```\n<!-- /capture)",
    re.DOTALL,
)
IMAGE = ROOT / "docs" / "images" / "page.png"


def main() -> None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with tempfile.TemporaryDirectory() as folder:
        found = {"demo": capture_demo(), **capture_run(Path(folder))}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        fill(path, found)


def fill(path: Path, found: dict[str, str]) -> None:
    """Replace the captures of a document; an unknown name is an error."""
    text = path.read_text("utf-8")
    new = MARK.sub(lambda m: m["name"] + m["open"] + found[m["name"]] + "\n", text)
    if new != text:
        path.write_text(new, "utf-8")
        print(path.relative_to(ROOT))


def capture_demo() -> str:
    """The end of ``make demo``: figures and a tree."""
    done = subprocess.run(
        [sys.executable, "examples/offline_generate.py"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.split("with against without")[1].splitlines()[1:]
    return "\n".join(line.rstrip() for line in lines if not line.startswith("──"))


def capture_run(folder: Path) -> dict[str, str]:
    """A tree as ``vllm-mtp show`` draws it, a line of the log, and the page."""
    sys.path.insert(0, str(ROOT))
    from tests.helpers.engine import engine, generate
    from tests.helpers.prompts import held_out
    from vllm_mtp.trace.load import load_trace

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    trace = folder / "trees.jsonl"
    settings = {"method": "mtp_tree", "shape": "fixed", "timing": True}
    with engine({**settings, "trace": str(trace)}, served_model_name="tiny") as llm:
        from vllm import SamplingParams

        logging.getLogger("vllm.vllm_mtp.metrics.stat_logger").addHandler(Keep())
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        generate(llm, held_out(4, (17, 30, 24, 40)), params)
        llm.llm_engine.do_log_stats()
    # The first with the longest accepted path; the first passes load kernels.
    steps = load_trace(trace).steps[12:]
    best = max(steps, key=lambda step: len(step.path))
    words = ["--request", best.request, "--step", str(best.step)]
    drawn = show(trace, *words).split("\nmodel ")[0]
    page = folder / "page.html"
    show(trace, "--html", str(page))
    take_picture(page, folder)
    return {
        "tree": "\n".join(line.rstrip() for line in drawn.strip().splitlines()),
        "metrics": lines[0],
        "summary": show(trace, "--summary").strip(),
    }


def show(trace: Path, *words: str) -> str:
    """What ``vllm-mtp show`` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_mtp.cli.main", "show", str(trace), *words],
        env={**os.environ, "COLUMNS": "120", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def take_picture(page: Path, folder: Path) -> None:
    """The page at its last step, as a picture; nothing without a Chromium."""
    from tests.helpers.browser import Page, find_chromium

    if find_chromium() is None:
        print(f"no Chromium found: {IMAGE.relative_to(ROOT)} stays as it is")
        return
    IMAGE.parent.mkdir(exist_ok=True)
    with Page(folder / "profile", width=1200, height=900) as browser:
        browser.open(page.as_uri())
        browser.press("End")
        browser.screenshot(IMAGE)


if __name__ == "__main__":
    main()
