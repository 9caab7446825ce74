"""Synthetic traces: EAGLE-2 trees of a made-up drafter whose scores are calibrated."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_mtp.trace.schema import Header, Step, header_to_json, step_to_json
from vllm_mtp.tree.layout import NO_PARENT

_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this "
    "have from or one had which you were all her she there would their we him been has "
    "when who will no more if out so up said what its about than into them can only "
    "other time new some could these two may first then do any like my now over such"
)
WORDS = tuple(" " + word for word in _COMMON.split())

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]>\"'`&amp;<b>",
    "\u2028\u2029\u202egnirts\u0000\x1b[31m",
    "javascript:alert(1)//",
    "\U0001f642\ufffd\u0301",
    "\n\n\t  ",
    "[red]markup[/red]",
)
"""Token texts that try to leave the place they are shown in."""


def make_step(
    rng: random.Random,
    number: int = 0,
    request: str = "req-0",
    shape: tuple[int, int, int] = (3, 4, 7),
    texts: Sequence[str] = WORDS,
    position: int = 10,
) -> Step:
    """One step: expand the best k nodes per level, keep the best N, draw, walk."""
    num_steps, topk, num_nodes = shape
    # (score, parent candidate, token), parents first
    cands: list[tuple[float, int, int]] = []
    frontier = [(0.0, NO_PARENT)]
    for _ in range(num_steps):
        level = []
        for score, cand in frontier:
            left = 1.0
            for token in rng.sample(range(len(texts)), topk):
                share = left * rng.uniform(0.3, 0.85)
                left -= share
                level.append((score + math.log(share), cand, token))
        start = len(cands)
        cands += level
        order = sorted(range(len(level)), key=lambda i: (-level[i][0], i))[:topk]
        frontier = [(level[i][0], start + i) for i in order]
    best = sorted(range(len(cands)), key=lambda c: (-cands[c][0], c))[:num_nodes]
    row_of = {NO_PARENT: 0} | {cand: row for row, cand in enumerate(best, start=1)}
    tokens = [rng.randrange(len(texts))] + [cands[c][2] for c in best]
    parents = [NO_PARENT] + [row_of[cands[c][1]] for c in best]
    scores = [0.0] + [round(cands[c][0], 5) for c in best]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    drawn = [
        _draw(rng, row, tokens, parents, scores, len(texts))
        for row in range(len(tokens))
    ]
    path, row = [0], 0
    while children := [
        c for c in range(len(tokens)) if parents[c] == row and tokens[c] == drawn[row]
    ]:
        row = children[0]
        path.append(row)
    shown = {*tokens, *drawn}
    return Step(
        request=request,
        step=number,
        time=1_700_000_000 + number * 0.03,
        batch=4,
        position=position,
        tokens=tuple(tokens),
        parents=tuple(parents),
        depths=tuple(depths),
        scores=tuple(scores),
        drawn=tuple(drawn),
        path=tuple(path),
        draft_ms=round(rng.uniform(2, 4), 2),
        verify_ms=round(rng.uniform(20, 30), 2),
        texts={token: texts[token] for token in shown},
    )


def _draw(
    rng: random.Random,
    row: int,
    tokens: list[int],
    parents: list[int],
    scores: list[float],
    vocab_size: int,
) -> int:
    """A child with the probability the drafter gave it, else a token of no child."""
    children = [c for c in range(len(tokens)) if parents[c] == row]
    point = rng.random()
    for child in children:
        point -= math.exp(scores[child] - scores[row])
        if point < 0:
            return tokens[child]
    taken = {tokens[c] for c in children}
    return rng.choice([t for t in range(vocab_size) if t not in taken])


def plain_step(step: Step) -> Step:
    """The same step without drafts: the root alone."""
    return replace(
        step,
        tokens=step.tokens[:1],
        parents=(NO_PARENT,),
        depths=(0,),
        scores=(0.0,),
        drawn=step.drawn[:1],
        path=(0,),
        draft_ms=None,
    )


def make_steps(
    num_steps: int,
    requests: Sequence[str] = ("req-0",),
    shape: tuple[int, int, int] = (3, 4, 7),
    texts: Sequence[str] = WORDS,
    seed: int = 0,
    plain_every: int = 0,
) -> list[Step]:
    """Steps of several requests; every ``plain_every``-th has no drafts."""
    rng = random.Random(seed)
    steps: list[Step] = []
    positions = dict.fromkeys(requests, 12)
    for number in range(num_steps):
        for request in requests:
            step = make_step(rng, number, request, shape, texts, positions[request])
            if plain_every and number % plain_every == plain_every - 1:
                step = plain_step(step)
            positions[request] += len(step.path)
            steps.append(step)
    return steps


def write_trace(path: Path, steps: Sequence[Step], model: str = "tiny") -> Path:
    """A trace file of the steps."""
    header = Header(
        run="run-0",
        created=1_700_000_000.0,
        model=model,
        settings={"num_steps": 3, "topk": 4, "num_speculative_tokens": 7},
        versions={"vllm_mtp": "0.1.0", "vllm": "0.32.0"},
    )
    lines = [header_to_json(header), *map(step_to_json, steps)]
    path.write_text("\n".join(lines) + "\n")
    return path
