"""A worker extension that hashes what each rank drafts and accepts, step by step.

Give ``WORKER_EXTENSION`` as ``worker_extension_cls``; ranks watch from the call of
``watch_trees`` on. It reads device tensors on the host, so it is for tests only.
"""

import hashlib
from typing import Any

import torch

WORKER_EXTENSION = "tests.helpers.rank_hashes.RankHashes"


class RankHashes:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def watch_trees(self) -> None:
        """From now on, hash drafted tokens, parents, sampled tokens and paths."""
        runner = self.model_runner
        speculator = runner.speculator
        propose, sample = speculator.propose, runner.sample
        self._step_hashes: list[str] = []

        def watched_propose(batch: Any, *args: Any, **kwargs: Any) -> Any:
            drafted = propose(batch, *args, **kwargs)
            parents = runner.tree.parents[batch.idx_mapping[: batch.num_reqs].long()]
            self._add("drafted", batch, drafted, parents)
            return drafted

        def watched_sample(hidden: Any, batch: Any, *args: Any) -> Any:
            output = sample(hidden, batch, *args)
            path = runner.tree.path[: batch.num_reqs]
            counts = output[1][: batch.num_reqs]
            kept = torch.arange(path.shape[1], device=path.device) < counts[:, None]
            self._add("accepted", batch, counts, path * kept)
            return output

        speculator.propose, runner.sample = watched_propose, watched_sample

    def _add(self, what: str, batch: Any, *tensors: torch.Tensor) -> None:
        digest = hashlib.sha256(f"{what} {batch.req_ids}".encode())
        for tensor in tensors:
            digest.update(tensor.cpu().numpy().tobytes())
        self._step_hashes.append(digest.hexdigest())

    def step_hashes(self) -> list[str]:
        """Two hashes a step: what was accepted, then what was drafted."""
        return self._step_hashes
