"""The corpus: Python's standard library and its documentation, tokenised.

Whole files are held out, by a hash of their names: neither the tokenizer nor the model
sees them.
"""

import dataclasses
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
BOS_ID, EOS_ID = 0, 1
HELD_OUT_SHARE = 1 / 25
MAX_FILE_CHARS = 200_000
# Tables, generated code, and texts that repeat the documentation word for word.
SKIPPED = ("site-packages/", "encodings/", "pydoc_data/", "_sysconfigdata")
PROMPT_LENGTHS = (16, 24, 32, 48, 64, 96, 128, 200)


@dataclasses.dataclass(frozen=True)
class TextFile:
    """One file of the corpus; `name` is its path inside its source tree."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is kept from training."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Token ids of both parts; files are separated by EOS."""

    train: np.ndarray
    held_out: np.ndarray

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        """Reads what `save` wrote."""
        with np.load(path) as arrays:
            return cls(arrays["train"], arrays["held_out"])

    def save(self, path: Path) -> None:
        """Writes a compressed `.npz`."""
        np.savez_compressed(path, train=self.train, held_out=self.held_out)


def iterate_files(stdlib: Path, docs: Path | None) -> Iterator[TextFile]:
    """Yields the usable files in a fixed order.

    Args:
        stdlib: Folder of the standard library's `.py` files.
        docs: Folder of the documentation's reStructuredText, or None for none.
    """
    roots = [("Lib", stdlib, ".py")]
    if docs is not None:
        roots += [("Doc", docs, ".rst"), ("Doc", docs, ".rst.txt")]
    for label, root, suffix in roots:
        for path in sorted(root.rglob(f"*{suffix}")):
            name = f"{label}/{path.relative_to(root).as_posix()}"
            if any(part in name for part in SKIPPED):
                continue
            try:
                text = path.read_bytes().decode()
            except UnicodeDecodeError:
                continue
            text = text.replace("\r\n", "\n").strip()
            if len(text) >= 200 and "\0" not in text:
                yield TextFile(name.removesuffix(".txt"), text[:MAX_FILE_CHARS])


def train_tokenizer(files: list[TextFile], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer that starts each text with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (file.text for file in files if not file.held_out)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def encode_corpus(files: list[TextFile], tokenizer: Tokenizer) -> Corpus:
    """Tokenises all files into one row of ids for each part."""
    parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for start in range(0, len(files), 64):
        batch = files[start : start + 64]
        encodings = tokenizer.encode_batch([file.text for file in batch])
        for file, encoding in zip(batch, encodings, strict=True):
            ids = np.array([*encoding.ids[1:], EOS_ID], dtype=np.uint16)
            parts[file.held_out].append(ids)
    # Neighbouring files are alike; a fixed shuffle spreads them.
    rng = np.random.default_rng(0)
    for rows in parts.values():
        rng.shuffle(rows)
    return Corpus(np.concatenate(parts[False]), np.concatenate(parts[True]))


def cut_prompts(
    files: list[TextFile], tokenizer: Tokenizer, num_prompts: int
) -> list[dict[str, object]]:
    """Cuts prompts from held-out files, at the starts of lines, one from a file."""
    rng = np.random.default_rng(0)
    held_out = [file for file in files if file.held_out and len(file.text) > 4_000]
    prompts: list[dict[str, object]] = []
    for index, chosen in enumerate(rng.permutation(len(held_out))[:num_prompts]):
        file = held_out[int(chosen)]
        lines = file.text.splitlines(keepends=True)
        start = int(rng.integers(len(lines) * 3 // 4))
        ids = tokenizer.encode("".join(lines[start:])[:4_000]).ids
        length = PROMPT_LENGTHS[index % len(PROMPT_LENGTHS)]
        ids = ids[: length + int(rng.integers(-3, 4))]
        prompts.append(
            {"file": file.name, "token_ids": ids, "text": tokenizer.decode(ids)}
        )
    return prompts


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, without indents."""
    folder.mkdir(parents=True, exist_ok=True)
    compact = json.dumps(
        json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")
    )
    (folder / "tokenizer.json").write_text(compact + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 163840,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def build_corpus(
    folder: Path, corpus_path: Path, docs: Path | None, vocab_size: int
) -> Corpus:
    """Trains the tokenizer, tokenises everything and cuts the prompts.

    Args:
        folder: Receives the tokenizer; `prompts.json` goes beside it.
        corpus_path: Receives the token ids.
        docs: Folder of the documentation sources, or None.
        vocab_size: Size of the vocabulary, both special tokens included.
    """
    files = list(iterate_files(Path(sysconfig.get_path("stdlib")), docs))
    tokenizer = train_tokenizer(files, vocab_size)
    save_tokenizer(tokenizer, folder)
    corpus = encode_corpus(files, tokenizer)
    corpus_path.parent.mkdir(parents=True, exist_ok=True)
    corpus.save(corpus_path)
    prompts = cut_prompts(files, tokenizer, num_prompts=48)
    (folder.parent / "prompts.json").write_text(
        json.dumps(prompts, ensure_ascii=False, indent=1) + "\n"
    )
    return corpus
