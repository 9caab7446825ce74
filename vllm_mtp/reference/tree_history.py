"""What sampling parameters that look back need: each row's own ancestors."""

import torch

from vllm_mtp.buffers import TreeBuffers


def gather_ancestors(
    buffers: TreeBuffers,
    # [num_rows] int64 row -> request slot
    row_slots: torch.Tensor,
    # [num_rows] int32 row within its request, 0: the root
    local_rows: torch.Tensor,
    # [num_rows] token fed into each row
    tokens: torch.Tensor,
    # [num_rows, S] int64, out
    ancestors: torch.Tensor,
) -> None:
    """Tokens drafted on the way from the root to each row, the row's own first.

    The root's token is committed already and is not among them. Places past the
    depth of a row hold -1; so does everything for a row that is padding.
    """
    for i in range(row_slots.shape[0]):
        ancestors[i] = -1
        first, row, j = i - int(local_rows[i]), int(local_rows[i]), 0
        while row > 0:
            ancestors[i, j] = tokens[first + row]
            row, j = int(buffers.parents[int(row_slots[i]), row]), j + 1


def penalize_ancestors(
    # [num_rows, V] float32, penalised for the committed tokens; in place
    logits: torch.Tensor,
    # [num_rows, S] float32, logits of the ancestors before any penalty
    raw: torch.Tensor,
    # [num_rows, S] int64, -1: none
    ancestors: torch.Tensor,
    # [num_rows] int64 row -> request slot
    row_slots: torch.Tensor,
    # [max_num_reqs] float32 each, by slot
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    # [max_num_reqs, V] int32 committed output tokens by slot
    output_bin_counts: torch.Tensor,
) -> None:
    """Write what the penalties make of the ancestors' tokens in each row.

    Only these tokens differ between the penalty for the committed tokens and the
    penalty for the committed tokens and the ancestors.
    """
    for i, slot in enumerate(row_slots.tolist()):
        tokens = ancestors[i].tolist()
        for j, token in enumerate(tokens):
            if token < 0:
                continue
            count = int(output_bin_counts[slot, token]) + tokens.count(token)
            scale = repetition_penalty[slot]
            value = raw[i, j] * (1.0 / scale if raw[i, j] > 0 else scale)
            value = value - frequency_penalty[slot] * count - presence_penalty[slot]
            logits[i, token] = value


def mask_bad_words(
    # [num_rows, V] float32, in place
    logits: torch.Tensor,
    # [num_rows, S] int64 ancestors of each row, own token first, -1: none
    ancestors: torch.Tensor,
    # [num_rows] int64 row -> request slot
    row_slots: torch.Tensor,
    # [max_num_reqs, *] int32 by slot: words one after the other, and where they start
    word_tokens: torch.Tensor,
    word_offsets: torch.Tensor,
    # [max_num_reqs] int32
    num_words: torch.Tensor,
    # [max_num_reqs, max_model_len] int32, [max_num_reqs] int32 each
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    # greatest num_words of the batch
    max_num_words: int,
) -> None:
    """Set to -inf the last token of each word whose other tokens end a row's output.

    A row's output is the committed output followed by its ancestors.
    """
    for i, slot in enumerate(row_slots.tolist()):
        path = [t for t in ancestors[i].tolist() if t >= 0][::-1]
        committed = all_token_ids[slot, int(prompt_len[slot]) : int(total_len[slot])]
        output = committed.tolist() + path
        for w in range(int(num_words[slot])):
            start, end = int(word_offsets[slot, w]), int(word_offsets[slot, w + 1])
            word = word_tokens[slot, start:end].tolist()
            before = word[:-1]
            if not before or output[-len(before) :] == before:
                logits[i, word[-1]] = float("-inf")
