"""Long prompts of text that the tiny model was not trained on."""

import functools
import sys
import sysconfig
from pathlib import Path

import numpy as np

TINY = Path(__file__).resolve().parents[2] / "examples" / "tiny_deepseek"


@functools.cache
def held_out_text(corpus: Path | None = None) -> np.ndarray:
    """Token ids of the held-out files of this Python's standard library.

    Args:
        corpus: What the tiny model's `train.py` saved, to read its held-out part.
    """
    sys.path.insert(0, str(TINY))
    from data import EOS_ID, Corpus, iterate_files  # type: ignore[import-not-found]
    from tokenizers import Tokenizer

    if corpus is not None:
        return np.asarray(Corpus.load(corpus).held_out, dtype=np.int64)
    stdlib = Path(sysconfig.get_path("stdlib"))
    texts = [file.text for file in iterate_files(stdlib, None) if file.held_out]
    if not texts:
        raise FileNotFoundError(
            f"{stdlib} has no standard library to read prompts from"
        )
    tokenizer = Tokenizer.from_file(str(TINY / "model" / "tokenizer.json"))
    encoded = tokenizer.encode_batch(texts)
    return np.concatenate([[*each.ids[1:], EOS_ID] for each in encoded])


def cut_windows(
    count: int, length: int, corpus: Path | None = None, longest: int | None = None
) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens, spread evenly over the text.

    No two start at the same place, so that none shares cached blocks with another. With
    the same ``longest`` (default: ``length``), prompts of different lengths end at the
    same places, so that what is generated is about as easy to predict.
    """
    text = held_out_text(corpus)
    longest = max(longest or length, length)
    room = len(text) - longest
    starts = np.linspace(0, max(room, 0), count).astype(int)
    if len(set(starts)) < count:
        raise ValueError(f"{len(text)} tokens of text are too few for {count} prompts")
    # Neighbours are alike; a fixed shuffle spreads them over the batches.
    np.random.default_rng(0).shuffle(starts)
    ends = starts + longest - 1
    return [[0, *text[end - length + 1 : end].tolist()] for end in ends]
