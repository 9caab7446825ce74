"""A draft tree drawn in the terminal with rich."""

import math
import unicodedata
from collections.abc import Collection, Sequence

from rich.text import Text
from rich.tree import Tree

from vllm_mtp.trace.schema import Step
from vllm_mtp.tree.layout import NO_PARENT

_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", " ": "\u00b7"}
_ACCEPTED = "bold green"


def printable(text: str) -> str:
    """Token text on one line: nothing in it can move the cursor or reorder the line.

    A space shows as a middle dot, everything that does not print as an escape.
    """
    return "".join(_printable_char(char) for char in text)


def _printable_char(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    # A combining mark would hang on whatever stands in front of the token.
    if char.isprintable() and not unicodedata.combining(char):
        return char
    return char.encode("unicode_escape").decode()


def draw_tree(
    tokens: Sequence[int],
    parents: Sequence[int],
    scores: Sequence[float | None],
    accepted: Collection[int],
    texts: Sequence[str | None] | None = None,
    drawn: int | None = None,
    drawn_text: str | None = None,
) -> Tree:
    """One tree as a rich renderable, the accepted path highlighted.

    Args:
        tokens: token id per row; row 0 is the root.
        parents: row of the parent, -1 for the root and for padding rows (not drawn).
        scores: cumulative log-probability per row, shown as percentages: of the node
            given its parent and, after the slash, of the whole path down to it.
        accepted: rows on the accepted path, the root included or not.
        texts: text per row; a row without one shows its id.
        drawn: the extra token that the target drew after the accepted path.
        drawn_text: its text.
    """
    texts = texts or [None] * len(tokens)
    accepted = {0, *accepted}
    label = _name(tokens[0], texts[0], _ACCEPTED)
    label.append("  root", "dim")
    nodes = {0: Tree(label, guide_style="dim")}
    for row in range(1, len(tokens)):
        parent = parents[row]
        if parent == NO_PARENT:
            continue
        on_path = row in accepted
        label = _name(tokens[row], texts[row], _ACCEPTED if on_path else "")
        label.append("  " + _percentages(scores[row], scores[parent]), "dim")
        if on_path:
            label.append("  accepted", "green")
        style = "green" if on_path else "dim"
        nodes[row] = nodes[parent].add(label, guide_style=style)
    if drawn is not None:
        label = _name(drawn, drawn_text, "bold cyan")
        label.append("  drawn by the target", "cyan")
        # A child comes after its parent, so the path ends at its highest row.
        nodes[max(accepted)].add(label)
    return nodes[0]


def draw_step(step: Step) -> Tree:
    """The tree of a traced step."""
    extra = step.emitted[-1]
    return draw_tree(
        step.tokens,
        step.parents,
        step.scores,
        step.path,
        [step.text(token) for token in step.tokens],
        extra,
        step.text(extra),
    )


def percent(log_probability: float) -> str:
    """A log-probability as a percentage, with a digit more where it is small."""
    value = 100 * math.exp(min(log_probability, 0.0))
    return f"{value:.0f}%" if value >= 9.5 else f"{value:.1f}%"


def _percentages(score: float | None, parent: float | None) -> str:
    if score is None or math.isinf(score):
        return "?"
    if not parent:
        return percent(score)
    return f"{percent(score - parent)} / {percent(score)}"


def _name(token: int, text: str | None, style: str) -> Text:
    if text is None:
        return Text(str(token), style)
    return Text(printable(text) or "(empty)", style)
