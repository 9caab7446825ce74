"""Chat with the log-probabilities of each token and of its rivals.

    examples/serve.sh                # in another terminal
    python examples/chat_logprobs.py "Why is the sky blue?"

The figures are the target's own, one set per token, whether the token came from a
draft or not.
"""

import argparse
import math

from openai import OpenAI
from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("message", nargs="?", default="What comes next?")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": args.message}],
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        logprobs=True,
        top_logprobs=3,
    )
    table = Table("token", "probability", "most likely")
    logprobs = answer.choices[0].logprobs
    for token in logprobs.content if logprobs and logprobs.content else []:
        rivals = (f"{t.token!r} {math.exp(t.logprob):.0%}" for t in token.top_logprobs)
        table.add_row(
            repr(token.token), f"{math.exp(token.logprob):.1%}", "  ".join(rivals)
        )
    console = Console()
    console.print(answer.choices[0].message.content, markup=False, highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()
