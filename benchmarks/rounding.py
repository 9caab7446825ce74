"""How far rounding alone moves the ids of no speculation, in bfloat16 and on a CPU.

    python -m benchmarks.rounding --out benchmarks/results/rounding.json

No trees: the reference generates greedily, once as it is and several times with
relative noise on the output of every sublayer, as large as one rounding to bfloat16 or
larger. At the first difference of two outputs the common prefix is scored without
noise (the margin rule of docs/verification.md). A row: ``noise``, ``outputs``,
``differ``, ``beyond`` (both tokens further apart than the tests' tolerance),
``largest`` (how far, in log-probability).
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common import write_record
from tests.e2e.test_ids import sampling
from tests.helpers.controls import Noise
from tests.helpers.engine import engine, generate, runner_of
from tests.helpers.margin import BFLOAT16_LOGIT_TOLERANCE, score_splits
from tests.helpers.prompts import held_out

COUNT, TOKENS = 48, 96
LENGTHS = (1, 2, 3, 7, 8, 9, 33, 120)
NOISES = (2.0**-9, 2.0**-8, 2.0**-7)


def main() -> None:
    """Measure every noise and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4, help="of each noise")
    args = parser.parse_args()
    prompts, params = held_out(COUNT, LENGTHS), sampling(COUNT, (0.0,), TOKENS)
    rows: list[dict[str, Any]] = []
    with engine(dtype="bfloat16", max_num_seqs=COUNT) as llm:
        noise = Noise(runner_of(llm).model)
        reference = generate(llm, prompts, params)
        for level in NOISES:
            gaps: list[float] = []
            for _ in range(args.rounds):
                noise.level = level
                found = generate(llm, prompts, params)
                noise.level = 0.0
                gaps += score_splits(llm, prompts, reference, found)
            beyond = [gap for gap in gaps if gap > BFLOAT16_LOGIT_TOLERANCE]
            rows.append(
                {
                    "noise": level,
                    "outputs": COUNT * args.rounds,
                    "differ": len(gaps),
                    "beyond": len(beyond),
                    "largest": round(max(gaps, default=0.0), 2),
                }
            )
            print(rows[-1], flush=True)
            write_record(args.out, rows)


if __name__ == "__main__":
    main()
