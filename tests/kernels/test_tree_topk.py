"""Best tokens of each row, against the twin and against the target's own sampler."""

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample

from tests.helpers.trees import DEVICE, POISON, assert_same, target_noise
from vllm_mtp.kernels.tree_topk import build_topk_workspace, tree_topk
from vllm_mtp.reference.tree_topk import tree_topk as plain_topk

LOGPROB_TOLERANCE = 2e-5
"""Summing up to 5000 float32 exponentials in another order, and noise that is off by up
to 1e-5, move the log by less."""


class Case:
    """Inputs of one call; request ``r`` is in slot ``2 * r``, its neighbours unused."""

    def __init__(self, logits, k, num_reqs=None, temperature=0.0, depth=0):
        self.logits = logits.to(DEVICE)
        self.k, self.depth = k, depth
        self.num_reqs = num_reqs or logits.shape[0]
        slots = 2 * torch.arange(self.num_reqs)
        self.idx_mapping = slots.to(DEVICE)
        # Before the first slot lies a temperature that an idle row must not take.
        wide = torch.full((2 * self.num_reqs + 1,), float("nan")).to(DEVICE)
        wide[0] = 1.0
        self.temperature = wide[1:]
        self.temperature[slots] = torch.as_tensor(temperature).float().to(DEVICE)
        rng = np.random.default_rng(7)
        seeds = rng.integers(-(2**63), 2**63 - 1, 2 * self.num_reqs)
        self.seeds = torch.from_numpy(seeds).to(DEVICE)
        self.positions = torch.arange(11, 11 + self.num_reqs, device=DEVICE)

    def run(self, use_fp64=False):
        """(ids, logprobs) of the kernel, on the host."""
        rows, vocab_size = self.logits.shape
        ids = torch.full((rows + 1, self.k), POISON, device=DEVICE)
        logprobs = torch.full((rows + 1, self.k), float("nan"), device=DEVICE)
        workspace = build_topk_workspace(rows, vocab_size, DEVICE)
        for scratch in vars(workspace).values():
            scratch.fill_(float("nan"))
        tree_topk(
            self.logits,
            ids,
            logprobs,
            self.idx_mapping,
            self.temperature,
            self.seeds,
            self.positions,
            self.depth,
            workspace,
            use_fp64=use_fp64,
        )
        assert (ids[rows:] == POISON).all()
        assert logprobs[rows:].isnan().all()
        return ids[:rows].cpu(), logprobs[:rows].cpu()

    def check(self):
        """The kernel agrees with the twin; returns what it found."""
        ids, logprobs = self.run()
        plain_ids = torch.empty_like(ids)
        plain_logprobs = torch.empty_like(logprobs)
        plain_topk(
            self.logits.cpu(),
            plain_ids,
            plain_logprobs,
            self.idx_mapping.cpu(),
            self.temperature.cpu(),
            self.seeds.cpu(),
            self.positions.cpu(),
            self.depth,
            target_noise,
        )
        assert_same(ids, plain_ids, "topk_ids")
        torch.testing.assert_close(
            logprobs, plain_logprobs, rtol=0, atol=LOGPROB_TOLERANCE
        )
        return ids, logprobs


def random_logits(rows, vocab_size, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    ("vocab_size", "k"),
    [(32, 4), (128, 8), (300, 5), (5000, 1), (5000, 4), (5000, 32)],
)
def test_agrees_with_twin(vocab_size, k, temperature):
    """Catches: fewer than k groups, k no power of two, several splits."""
    Case(random_logits(2, vocab_size), k, temperature=temperature).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_ties(dtype):
    """Catches: ties not lowest token first (rounding makes hundreds of ties)."""
    logits = (random_logits(2, 3000, seed=1) / 3).round().to(dtype)
    ids, _ = Case(logits, 8).check()
    assert (logits[0, ids[0]] == logits[0, ids[0, 0]]).all()


def test_best_tokens_in_vocabulary_tail():
    """Catches: a tail block masked away, or read past the end of the row."""
    wide = torch.full((2, 4300), 99.0)
    logits = random_logits(2, 4200)
    logits[:, 4197:] = torch.tensor([20.0, 30.0, 25.0])
    wide[:, :4200] = logits
    ids, _ = Case(wide.to(DEVICE)[:, :4200], 4).check()
    assert ids[:, :3].tolist() == [[4198, 4199, 4197]] * 2


def test_best_tokens_share_a_group():
    """Catches: one winner per group of 128 tokens."""
    logits = random_logits(1, 2000)
    logits[0, 700:708] = torch.arange(40.0, 48.0)
    ids, _ = Case(logits, 8).check()
    assert ids.tolist() == [list(range(707, 699, -1))]


def test_odd_row_stride():
    """Catches: logits taken for contiguous."""
    wide = random_logits(4, 1031)
    Case(wide.to(DEVICE)[::2, 3:1000], 4).check()


# The interpreter is numpy, which speaks up about NaN and infinities.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nan_and_infinities(temperature):
    """Catches: NaN winning a maximum or poisoning the sum; taken confused with -inf."""
    inf, nan = float("inf"), float("nan")
    logits = torch.full((6, 1400), -inf)
    logits[0] = random_logits(1, 1400)[0]
    logits[0, ::3] = nan
    logits[0, 128:640] = nan
    logits[1] = nan
    logits[3, 650] = 1.0
    logits[4] = random_logits(1, 1400)[0]
    logits[4, 5] = inf
    logits[5] = 0.0
    logits[5, ::2] = -0.0
    ids, logprobs = Case(logits, 4, temperature=temperature).check()
    assert ids[1].tolist() == ids[2].tolist() == [0, 1, 2, 3]
    assert (logprobs[1:3] == -inf).all()
    assert ids[3].tolist() == [650, 0, 1, 2]
    assert abs(logprobs[3, 0]) <= LOGPROB_TOLERANCE
    assert (logprobs[3, 1:] == -inf).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_lowest_float_beats_minus_infinity():
    """Catches: -inf replaced by the lowest float, which masks use as well."""
    logits = torch.full((1, 700), float("-inf"))
    logits[0, 300:303] = torch.finfo(torch.float32).min
    ids, _ = Case(logits, 4).run()
    assert ids.tolist() == [[300, 301, 302, 0]]


def test_rows_of_a_request_share_noise_and_depth_counts():
    """Catches: noise by row, a position without depth, noise in idle rows."""
    one = random_logits(1, 600)
    case = Case(one.expand(12, -1), 4, num_reqs=3, temperature=1.0, depth=2)
    case.idx_mapping[1] = -1
    ids, _ = case.check()
    assert (ids[0:4] == ids[0]).all()
    assert (ids[8:12] == ids[8]).all()
    assert ids[0].tolist() != ids[8].tolist()
    assert_same(ids[4], one[0].sort(descending=True, stable=True).indices[:4])


def test_greedy_and_sampled_in_one_batch():
    """Catches: the temperature of one request used for another."""
    logits = random_logits(4, 1500)
    Case(logits, 4, temperature=[0.0, 0.5, 0.0, 2.0]).check()


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_first_token_is_the_targets(temperature, use_fp64):
    """Catches: draft salt, other noise, another order of division and noise.

    With the target's own logits the best child has to be the target's own draw, bit
    for bit. Put wrong (position off by one), every row but one differs.
    """
    rows, depth = 8, 3
    logits = random_logits(rows, 1100, seed=3) / 3
    case = Case(logits, 4, temperature=temperature, depth=depth)
    ids, _ = case.run(use_fp64=use_fp64)
    target = case.logits.clone()
    apply_temperature(target, case.idx_mapping, case.temperature)
    expected = gumbel_sample(
        target,
        case.idx_mapping,
        case.temperature,
        case.seeds,
        case.positions + depth,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=use_fp64,
    )
    assert_same(ids[:, 0], expected)


def test_wrong_calls_are_refused():
    """Catches: a wrong workspace or dtype running into memory."""
    case = Case(random_logits(2, 300), 4)
    args = {
        "logits": case.logits,
        "topk_ids": torch.empty(2, 4, dtype=torch.int64, device=DEVICE),
        "topk_logprobs": torch.empty(2, 4, device=DEVICE),
        "idx_mapping": case.idx_mapping,
        "temperature": case.temperature,
        "seeds": case.seeds,
        "positions": case.positions,
        "depth": 0,
        "workspace": build_topk_workspace(2, 300, DEVICE),
    }
    for change, words in [
        ({"workspace": build_topk_workspace(1, 300, DEVICE)}, "workspace: 1 rows"),
        ({"topk_ids": args["topk_ids"].int()}, "topk_ids: dtype"),
        ({"logits": case.logits.double()}, "logits: dtype"),
        ({"logits": case.logits.T.contiguous().T}, "contiguous"),
        ({"topk_logprobs": args["topk_logprobs"][:1]}, "topk_logprobs: shape"),
    ]:
        with pytest.raises(ValueError, match=words):
            tree_topk(**(args | change))
