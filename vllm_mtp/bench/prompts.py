"""Prompts of many kinds: how well drafts are accepted depends on the text."""

import json
from pathlib import Path

from vllm_mtp.config import SettingsError

PROMPTS = (
    "Explain to a ten-year-old why the sky is blue and sunsets are red.",
    "Write a Python function that merges two sorted lists, with a docstring and tests.",
    "Translate into French: The meeting was moved to Thursday because of the storm.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Show how.",
    "List ten countries of Africa with their capitals, one per line.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Summarise the causes of the French Revolution in five sentences.",
    "Write a SQL query for the three customers with the highest total of orders.",
    "What are the differences between TCP and UDP? Answer as a table.",
    "Prove that the square root of two is irrational.",
    "Give me a recipe for lentil soup for four people, step by step.",
    'Turn into JSON: "Ada Lovelace, born 1815 in London, mathematician".',
    "Write a polite e-mail that asks a colleague to review a document by Friday.",
    "How does a bill become a law in a parliamentary system?",
    "Write a haiku about winter, and then one about a city at night.",
    "Find the bug: for (int i = 0; i <= n; i++) sum += a[i]; where a has n elements.",
)


def load_prompts(path: Path | None) -> list[str]:
    """Prompts of a file, or the built-in ones.

    A ``.jsonl`` file has a string, or an object with the key ``prompt``, on each line;
    any other file a prompt per line.

    Raises:
        SettingsError: the file cannot be read or holds no prompt.
    """
    if path is None:
        return list(PROMPTS)
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        if path.suffix == ".jsonl":
            entries = [json.loads(line) for line in lines]
            lines = [e if isinstance(e, str) else str(e["prompt"]) for e in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(
            f"{path}: not a file of prompts ({error!r}). Use one prompt a line, or "
            '.jsonl with {"prompt": ...} a line.'
        ) from error
    if not lines:
        raise SettingsError(f"{path}: holds no prompt.")
    return lines
