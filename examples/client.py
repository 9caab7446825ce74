"""Stream from a running server, and read its counters of speculation.

    examples/serve.sh                # in another terminal
    python examples/client.py "Once upon a time"

Any OpenAI client works: draft trees change nothing but the time, and that a chunk may
bring several tokens.
"""

import argparse
import urllib.request

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="The first thing to know is")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()

    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    stream = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=args.prompt,
        max_tokens=args.max_tokens,
        temperature=0.0,
        stream=True,
    )
    chunks = 0
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
        chunks += 1
    drafts, accepted = read_counters(args.url)
    print(f"\n\n{chunks} chunks for up to {args.max_tokens} tokens")
    if drafts:
        print(f"mean accept length since the start: {1 + accepted / drafts:.3f}")


def read_counters(url: str) -> tuple[float, float]:
    """Steps with drafts and accepted drafts, of all requests since the start."""
    page = urllib.request.urlopen(f"{url}/metrics").read().decode()
    totals = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith("vllm:spec_decode_num_")
    }
    return (
        totals.get("vllm:spec_decode_num_drafts_total", 0.0),
        totals.get("vllm:spec_decode_num_accepted_tokens_total", 0.0),
    )


if __name__ == "__main__":
    main()
