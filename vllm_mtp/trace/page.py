"""A trace as one self-contained page: no server, no network, no other file.

The data lies in the page as JSON in a block that browsers do not execute, and the
page's script only ever shows it as text. A content security policy with the hashes of
the one style sheet and the one script forbids everything else.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from vllm_mtp.trace.schema import Step, Trace

# In JSON these can only stand inside strings, where an escape means the same. With
# "<" gone, no text can close the data block or open another element.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def write_page(trace: Trace, steps: Sequence[Step], path: Path) -> int:
    """Write the page of some steps of a trace; return its size in bytes."""
    page = render_page(trace, steps).encode()
    path.write_bytes(page)
    return len(page)


def render_page(trace: Trace, steps: Sequence[Step]) -> str:
    """The page as text; see the module docstring for what keeps it safe."""
    template = (
        resources.files("vllm_mtp.trace").joinpath("page.html").read_text("utf-8")
    )
    parts = {
        "CSP": _policy(template),
        "TITLE": html.escape(f"Draft trees: {trace.header.model}"),
        "DATA": safe_json(_page_data(trace, steps)),
    }
    # One pass, so that a marker inside the data stays what it is.
    return re.sub("__(CSP|TITLE|DATA)__", lambda m: parts[m[1]], template)


def safe_json(value: Any) -> str:
    """ASCII JSON that may stand inside a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda m: _UNSAFE[m[0]], text)


def _policy(template: str) -> str:
    style, script = (_hash(_content(template, tag)) for tag in ("style", "script"))
    return (
        f"default-src 'none'; style-src {style}; script-src {script}; "
        "base-uri 'none'; form-action 'none'"
    )


def _content(template: str, tag: str) -> str:
    """Content of the one element that is written without attributes."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    return str(content)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _page_data(trace: Trace, steps: Sequence[Step]) -> dict[str, Any]:
    """What the page's script reads; one-letter keys, since they repeat per step."""
    requests = list(dict.fromkeys(step.request for step in steps))
    number = {request: i for i, request in enumerate(requests)}
    texts: dict[int, str] = {}
    for step in steps:
        texts.update(step.texts)
    notes = list(trace.notes)
    if trace.dropped:
        notes.append(f"{trace.dropped} passes are missing: the disk was too slow")
    return {
        "model": trace.header.model,
        "settings": dict(trace.header.settings),
        "versions": dict(trace.header.versions),
        "notes": notes,
        "requests": requests,
        "prompts": {
            prompt.request: {"tokens": prompt.tokens, "text": prompt.text}
            for prompt in trace.prompts.values()
            if prompt.request in number
        },
        "texts": texts,
        "steps": [_page_step(step, number[step.request]) for step in steps],
    }


def _page_step(step: Step, request: int) -> dict[str, Any]:
    return {
        "r": request,
        "n": step.step,
        "b": step.batch,
        "p": step.position,
        "k": step.tokens,
        "a": step.parents,
        "s": step.scores,
        "d": step.drawn,
        "h": step.path,
        "m": step.draft_ms,
        "v": step.verify_ms,
    }
