"""The forward pass over responses: exact, without the work that a plain batch does twice.

A plain batch runs [prompt, response] for each of the G siblings of a prompt, and holds a tensor of
(tokens, V) logits. Neither is needed:

  Shared prompts. Siblings become one row [prompt, response 1, .., response G]. Position ids restart
  at len(prompt) for each response and a mask lets a response see the prompt and itself. So a token
  attends to the tokens, at the positions, that it would have in a row of its own: same numbers.
  Prompts that begin alike, as the teacher's do, become a tree: the beginning, the rest of each.

  Chunked heads. The loss of a token takes the logits of that token alone. `head_loss` runs
  hidden states -> lm_head -> loss -> gradient for some hundred tokens at a time and keeps the
  gradient of the hidden states, so that no (tokens, V) tensor outlives its chunk. The sum of the
  chunks' gradients is the gradient of the sum.

`probe` sets model.states, .can_pack and .plain_head, which say what a model can take.

Legend: S rows after packing, L their length, n response tokens of a micro-batch, flat, row after
row, without padding, c tokens of a chunk, D hidden size, V vocabulary.
"""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

# Logits at a time, c * V. On a CPU 16 MiB in float32: malloc hands larger pieces back to the system
# after each use, and touching fresh pages takes longer than an exp. A GPU wants more at a time.
CHUNK = 2**26 if torch.cuda.is_available() else 2**22


def compute(model):
    """The context in which a model runs: matmuls in the compute_dtype that distribute set."""
    dtype = getattr(model, "compute_dtype", None)
    return torch.autocast(model.device.type, dtype) if dtype else contextlib.nullcontext()


# ---- from rows to hidden states ------------------------------------------------------------------

def families(prompts):
    """Prompts that begin alike, as the teacher's do: one question, several demonstrations.

    {row: token ids} -> [(shared, branches)]: how many first tokens a family's prompts share, and
    its rows, a list for each distinct prompt. A prompt joins a family if they share at least half
    of the shorter one.
    """
    branches, found = {}, []
    for row, prompt in prompts.items():
        branches.setdefault(tuple(prompt), []).append(row)
    for prompt, rows in branches.items():
        for family in found:
            start = os.path.commonprefix([family[0], prompt])  # of any two sequences
            if 2 * len(start) >= min(len(family[0]), len(prompt)):
                family[0] = start
                family[1].append(rows)
                break
        else:
            found.append([prompt, [rows]])
    return [(len(start), rows) for start, rows in found]


def arrange(prompts, responses, pack, pairs=float("inf")):
    """How rows share prompts: [(tokens, shared, branches)], as `families` has them. prompts,
    responses: {row: token ids}, or lists of them.

    A shared prompt saves tokens, but attention also computes the pairs of tokens that its mask
    hides; `pairs` of them take the time of a token's other layers. Each family is laid out in the
    cheapest of three ways: as a tree, with a row a prompt, with a row a response.
    """
    def part(shared, branches):
        return (shared + sum(len(prompts[rows[0]]) - shared for rows in branches)
                + sum(len(responses[i]) - 1 for rows in branches for i in rows)), shared, branches

    def cost(parts):
        return sum(size * (1 + size / pairs) for size, *_ in parts)

    found = []
    for shared, branches in families(prompts):
        alike = [part(len(prompts[rows[0]]), [rows]) for rows in branches]
        alone = [part(len(prompts[i]), [[i]]) for rows in branches for i in rows]
        found += min([part(shared, branches)], alike, alone, key=cost) if pack else alone
    return found


def layout(prompts, responses, pack, device="cpu", pairs=float("inf")):
    """Lay rows out for one forward pass.

    prompts, responses: lists of token ids, one of each a row. Returns input_ids and position_ids
    (S, L); a boolean mask (S, 1, L, L), or None where it would be the causal one; and index (n,):
    where in the flattened (S * L) positions the prediction of each response token stands.

    A token belongs to a segment: the shared beginning q, the rest d of a prompt, a response r. It
    sees what came before it in its own segment, its branch's and its root's. One question, two
    demonstrations d and e, three responses:

        token     q q  d d  r r r  r r  e e e  r r
        own       1 1  2 2  3 3 3  4 4  5 5 5  6 6
        branch    1 1  2 2  2 2 2  2 2  5 5 5  5 5
        root      1 1  1 1  1 1 1  1 1  1 1 1  1 1
        position  0 1  2 3  4 5 6  4 5  2 3 4  5 6
    """
    parts = arrange(dict(enumerate(prompts)), responses, pack, pairs)
    together, width = len(parts) < len(prompts), max(size for size, *_ in parts)
    packed, places, segment = [], {}, 0

    def put(ids, position, branch=None, root=None):  # a segment; it is its own where none is given
        nonlocal segment
        segment += 1
        seen = segment, branch or segment, root or segment
        row.extend((token, position + k, *seen) for k, token in enumerate(ids))
        return segment

    for size, shared, branches in sorted(parts, key=lambda part: part[0], reverse=True):
        # strangers share a row where both fit, so that little of it is padding
        room = (s for s, row in enumerate(packed) if together and len(row) + size <= width)
        s = next(room, len(packed))
        packed += [[]] if s == len(packed) else []
        row = packed[s]
        root = put(prompts[branches[0][0]][:shared], 0)
        end = len(row) - 1
        for rows in branches:
            prompt = prompts[rows[0]]
            branch = put(prompt[shared:], shared, root=root)
            last = len(row) - 1 if len(prompt) > shared else end
            for i in rows:
                # the prompt's last position predicts token 1, that of token t - 1 predicts token t:
                # the last token of a response predicts nothing and is no input
                places[i] = [(s, last), *((s, len(row) + k) for k in range(len(responses[i]) - 1))]
                put(responses[i][:-1], len(prompt), branch, root)
    padded = torch.tensor([row + [(0, 0, -1, -1, -1)] * (width - len(row)) for row in packed],
                          device=device)  # (S, L, 5)
    input_ids, position_ids, *segments = padded.unbind(-1)
    mask = None  # a lone response sees all before it; padding comes behind, so nobody sees it
    if together:  # a token sees what came before it of its own segment and of those above
        key, (own, branch, root) = segments[0][:, None, :], (x[:, :, None] for x in segments)
        mask = (key == own) | (key == branch) | (key == root)
        mask = (mask & mask.new_ones(width, width).tril())[:, None]  # (S, 1, L, L)
    index = torch.tensor([s * width + p for i in range(len(prompts)) for s, p in places[i]])
    return input_ids, position_ids, mask, index.to(device)


def pairs_per_token(model):
    """Of `arrange`. With a feed-forward of 4 D, a layer takes 24 D^2 FLOPs a token, 4 D a pair."""
    return 6 * model.config.get_text_config().hidden_size


def response_hidden(model, rows, prompts, responses, pack=True):
    """Hidden states (n, D) that predict the response tokens of some rows.

    rows: numbers into the lists of token ids `prompts` and `responses`. A model whose head is more
    than one linear layer returns logits (n, V) instead, and `head` leaves them. Without rows one
    dummy token runs, so that under FSDP every rank joins every collective, and (0, D) comes back,
    which gives each weight a gradient of zero.
    """
    prompts, responses = ([x[i] for i in rows] or [[0]] for x in (prompts, responses))
    input_ids, position_ids, mask, index = layout(
        prompts, responses, pack and model.can_pack, model.device, pairs_per_token(model))
    with compute(model):
        states = model.states(input_ids=input_ids, position_ids=position_ids,
                              attention_mask=mask, use_cache=False)  # (S, L, D)
    return states.flatten(0, 1)[index if rows else index[:0]]


def _states(model, **inputs):
    return model.base_model(**inputs).last_hidden_state if model.plain_head else (
        model(**inputs).logits)


def head(model, hidden):
    """Logits (n, V) of hidden states (n, D)."""
    if not model.plain_head:
        return hidden
    layer = model.get_output_embeddings()
    with compute(model):
        return F.linear(hidden, layer.weight, layer.bias)


# ---- from hidden states to a loss ----------------------------------------------------------------

def head_loss(model, hidden, token_loss):
    """The sum of token_loss over the n tokens of hidden (n, D), a scalar with a gradient.

    token_loss(logits (c, V), at (c,)) -> (c,) is called once for each chunk; `at` are the places of
    its tokens among the n. It treats tokens independently and weighs them itself, with a normaliser
    known beforehand; then the chunks change nothing.
    """
    layer = model.get_output_embeddings() if model.plain_head else None
    weight, bias = (layer.weight, layer.bias) if layer is not None else (None, None)
    with compute(model):
        return _ChunkedLoss.apply(hidden, weight, bias, chunk_size(model), token_loss)


def chunk_size(model):
    return max(1, CHUNK // model.config.get_text_config().vocab_size)


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the losses, through hidden (n, D), weight (V, D) and bias (V). The gradients are taken
    in the forward pass, where a chunk's logits are at hand, and only scaled in the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, size, token_loss):
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        grad_hidden = torch.zeros_like(hidden)
        grads = [None if x is None else torch.zeros_like(x, dtype=total.dtype)
                 for x in (weight, bias)]
        for at in torch.arange(len(hidden), device=hidden.device).split(size):
            h = hidden[at]
            logits = h if weight is None else F.linear(h, weight, bias)  # (c, V)
            with torch.enable_grad():
                logits = logits.detach().requires_grad_()
                loss = token_loss(logits, at).sum()
                (grad,) = torch.autograd.grad(loss, logits)
            total += loss.detach()
            grad_hidden[at] = (grad if weight is None else grad @ weight.to(grad.dtype)).to(h.dtype)
            if weight is not None:
                if grad.dtype == total.dtype:
                    grads[0].addmm_(grad.T, h.to(grad.dtype))  # no (V, D) tensor beside it
                else:
                    grads[0] += grad.T @ h.to(grad.dtype)
            if bias is not None:
                grads[1] += grad.sum(0)
        ctx.save_for_backward(grad_hidden, *grads)
        ctx.dtypes = [x.dtype if x is not None else None for x in (hidden, weight, bias)]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale):
        grads = [None if g is None else (g * scale).to(dtype)
                 for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return *grads, None, None


# ---- from rows to micro-batches ------------------------------------------------------------------

def micro_batches(model, rows, passes, responses, tokens_per_micro, pack=True):
    """Split rows into micro-batches of at most `tokens_per_micro` tokens (one row at the least),
    prompts counted as often as they are read, and padding of rows that share nothing.

    rows: numbers into lists of token ids: `responses` and, for every forward pass that a row takes,
    a list of prompts in `passes` (the student's; the teacher's). Siblings, rows with one and the
    same student prompt, stay together where the budget allows. Returns lists of row numbers,
    longest first, then empty lists, so that all ranks have equally many. The gradient does not
    depend on the split; time and memory do.
    """
    def cost(rows):
        most = 0
        for prompts in passes:
            parts = arrange({i: prompts[i] for i in rows}, responses, pack and model.can_pack,
                            pairs_per_token(model))
            sizes = [size for size, *_ in parts]
            padded = len(sizes) * max(sizes, default=0)
            most = max(most, sum(sizes) if len(sizes) < len(rows) else padded)
        return most

    def fit(rows):  # halve siblings until they fit
        if len(rows) == 1 or cost(rows) <= tokens_per_micro:
            return [rows]
        return fit(rows[:len(rows) // 2]) + fit(rows[len(rows) // 2:])

    siblings = {}
    for i in rows:
        siblings.setdefault(tuple(passes[0][i]), []).append(i)
    units = [unit for group in siblings.values() for unit in fit(group)]
    batches = []
    for unit in sorted(units, key=cost, reverse=True):
        if not batches or cost(batches[-1] + unit) > tokens_per_micro:
            batches.append([])
        batches[-1] += unit
    most = torch.tensor(len(batches))
    if dist.is_initialized():
        most = most.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return batches + [[]] * (int(most) - len(batches))


def tokens(rows, rollouts, masks, weights, device):
    """The tokens of some rows that the loss is taken of: for each the number of its row, its id,
    its log-probability by the trainer and by the sampler when it was sampled, and its weight, all
    (n,); and keep, a mask over ALL response tokens of the rows, of which they are n. masks,
    weights: for each row (T,), (>= T,)."""
    if not rows:
        none = torch.zeros(0, device=device)
        return none.long(), none.long(), none, none, none, none.bool()
    keep = torch.cat([masks[i] for i in rows])
    row = torch.tensor([i for i in rows for _ in rollouts[i].ids])
    label = torch.tensor([t for i in rows for t in rollouts[i].ids])
    old = torch.cat([rollouts[i].old for i in rows])
    sampled = torch.cat([rollouts[i].logprobs for i in rows])
    weight = torch.cat([weights[i][:len(masks[i])] for i in rows])
    return *(x[keep].to(device) for x in (row, label, old, sampled, weight)), keep.to(device)


@torch.no_grad()
def probe(model):
    """Find out on ten tokens what an architecture can do, and note it on the model: `plain_head`
    (logits are one linear layer of the last hidden states), `can_pack` (position ids and a 4-D mask
    are honoured); `states` is the forward pass up to that head. Returns one line on what takes the
    plain path instead, or ""."""
    def run(pack):
        hidden = response_hidden(model, [0, 1], [[1, 2, 3, 4]] * 2, [[5, 6, 7], [8, 9]], pack)
        return head(model, hidden).float()

    def same(x, y):
        return x.shape == y.shape and torch.allclose(x, y, atol=tolerance, rtol=tolerance)

    tolerance = 0.05 if model.dtype == torch.bfloat16 else 1e-3
    model.states = _states.__get__(model)
    model.plain_head = model.can_pack = False
    plain = run(pack=False)
    model.plain_head = True
    model.plain_head = same(plain, run(pack=False))
    windows = "sliding_attention" in (getattr(model.config, "layer_types", None) or [])
    model.can_pack = not windows and model.config._attn_implementation == "sdpa"
    model.can_pack = model.can_pack and same(plain, run(pack=True))
    notes = [] if model.plain_head else ["its head is no single linear layer, so it is not chunked"]
    notes += [] if model.can_pack else ["it takes no 4-D mask, so siblings do not share a prompt"]
    return f"{type(model).__name__}: {'; '.join(notes)}" if notes else ""
