"""Packed rows, chunked heads and micro-batches give the numbers of a plain batch."""
import pytest
import torch
import worker
from torch.nn import functional as F

import losses
import packing

VOCAB = 40


def model(kind, attention=None):
    made = worker.make_model(kind, VOCAB)
    if attention:
        made.set_attn_implementation(attention)
    made.note = packing.probe(made)
    return made


def rows(seed=0):
    """Prompts and responses; rows 0, 1, 3 are siblings, and one response is a single token."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in (5, 5, 9, 5, 2)]
    prompts[1] = prompts[3] = prompts[0]
    lengths = (4, 7, 1, 2, 6)
    responses = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return prompts, responses


def alone(net, prompt, response):
    """The logits that predict a response, from one plain call for this row alone."""
    logits = net(input_ids=torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1:-1]


# ---- rows to hidden states -----------------------------------------------------------------------

@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("kind", ["llama", "untied", "gpt2", "qwen3", "gemma2"])
def test_rows_as_if_alone(kind, pack):
    """Whatever shares a row or a batch with it, and however it is padded. Rotary and absolute
    positions; Gemma 2 caps its logits and has sliding windows, so it takes the plain path."""
    net, (prompts, responses) = model(kind), rows()
    assert net.can_pack == net.plain_head == (kind != "gemma2")
    with torch.no_grad():
        for chosen in ([0, 1, 2, 3, 4], [4, 0], [3, 2, 1], [2]):
            hidden = packing.response_hidden(net, chosen, prompts, responses, pack)
            ours = packing.head(net, hidden)
            theirs = torch.cat([alone(net, prompts[i], responses[i]) for i in chosen])
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_layout():
    """By hand: siblings [1 2] -> [3 4 5] and [6 7], and a row [8] -> [9]."""
    ids, positions, mask, index = packing.layout(
        [[1, 2], [8], [1, 2]], [[3, 4, 5], [9], [6, 7]], pack=True)
    assert ids.tolist() == [[1, 2, 3, 4, 6], [8, 0, 0, 0, 0]]
    assert positions[0].tolist() == [0, 1, 2, 3, 2] and positions[1, 0] == 0
    assert index.tolist() == [1, 2, 3, 5, 1, 4]  # L24: the prompt's last token predicts the first
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0],
                                         [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert mask[1, 0].int().tolist()[0] == [1, 0, 0, 0, 0]
    assert mask.any(-1).all()  # each query sees something, or its softmax would be nan
    ids, positions, mask, index = packing.layout([[1, 2], [8]], [[3, 4], [9]], pack=True)
    assert mask is None and ids.tolist() == [[1, 2, 3], [8, 0, 0]] and index.tolist() == [1, 2, 3]


def test_layout_of_prompts_that_begin_alike():
    """[1 2 3] -> [4 5], [1 2 6] -> [7], and [1 2] itself -> [8 9]: 1 2 once, then 3 4, 6, and 8."""
    given = [[1, 2, 3], [1, 2, 6], [1, 2]], [[4, 5], [7], [8, 9]]
    ids, positions, mask, index = packing.layout(*given, pack=True)
    assert ids.tolist() == [[1, 2, 3, 4, 6, 8]] and positions.tolist() == [[0, 1, 2, 3, 2, 2]]
    assert index.tolist() == [2, 3, 4, 1, 5]
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1]]
    ids, _, mask, _ = packing.layout(*given, pack=True, pairs=1e-9)  # as if pairs cost all the time
    assert mask is None and len(ids) == 3
    long = [list(range(9)), list(range(9))], [[1] * 20, [2] * 20]
    shapes = [len(packing.layout(*long, pack=True, pairs=w)[0]) for w in (10, 100)]
    assert shapes == [2, 1]  # 47 tokens and 47^2 pairs, or 56 tokens and 2 x 28^2 pairs


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_a_tree_of_prompts_as_if_alone(kind):
    net, draw = model(kind).double(), torch.Generator().manual_seed(1)
    words = torch.randint(1, VOCAB, (60,), generator=draw).tolist()
    prompts = [words[:12] + words[k:k + n] for k, n in ((20, 5), (30, 7), (20, 5), (40, 0))]
    prompts += [words[40:49], words[40:46]]  # another family, one prompt the other's beginning
    responses = [words[50 - k:52 + k] for k in range(6)]
    with torch.no_grad():
        packed = packing.head(net, packing.response_hidden(net, range(6), prompts, responses))
        plain = packing.head(net, packing.response_hidden(net, range(6), prompts, responses, False))
    tokens = packing.layout(prompts, responses, True)[0]
    assert tokens.numel() < sum(map(len, prompts)) + sum(map(len, responses)) - 6
    error = (packed - plain).norm() / plain.norm()
    assert error < (1e-9 if kind == "gpt2" else 1e-6)  # the others' norms are float32


def test_no_row():
    """The dummy token joins the collectives and gives each weight a gradient, of zero."""
    net = model("llama")
    hidden = packing.response_hidden(net, [], [], [])
    assert hidden.shape == (0, 32)
    packing.head_loss(net, hidden, lambda logits, at: logits.sum(-1)).backward()
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


# ---- hidden states to a loss ---------------------------------------------------------------------

def token_loss(logits, at):
    """Something of each kind that the trainers do with the logits of a token."""
    at = at.to(torch.float64)
    return logits.logsumexp(-1) * (at + 1) - (logits.log_softmax(-1)[:, 0] * logits[:, 1]).exp()


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_chunked_loss_gradcheck(size, bias):
    generator = torch.Generator().manual_seed(size)
    shapes = [(7, 4), (5, 4)] + [(5,)] * bias
    hidden, weight, *rest = (torch.randn(s, generator=generator, dtype=torch.float64,
                                         requires_grad=True) for s in shapes)
    inputs = (hidden, weight, rest[0] if rest else None)

    def chunked(hidden, weight, bias):
        return packing._ChunkedLoss.apply(hidden, weight, bias, size, token_loss)

    def plain(hidden, weight, bias):
        return token_loss(F.linear(hidden, weight, bias), torch.arange(7)).sum()

    torch.testing.assert_close(chunked(*inputs), plain(*inputs))
    wanted = torch.autograd.grad(2.5 * plain(*inputs), inputs[:2 + bias])
    got = torch.autograd.grad(2.5 * chunked(*inputs), inputs[:2 + bias])
    torch.testing.assert_close(got, wanted)
    assert torch.autograd.gradcheck(chunked, inputs)
    logits = hidden.detach().clone().requires_grad_()  # without a head: a model that took its own
    assert torch.autograd.gradcheck(lambda x: chunked(x, None, None), (logits,))


@pytest.mark.parametrize("kind", ["llama", "untied", "gpt2", "gemma2"])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_model_gradient(kind, chunk, monkeypatch):
    """head_loss against autograd through the whole model, one row at a time: the tied weight gets
    its part as embedding and its part as head."""
    monkeypatch.setattr(packing, "CHUNK", chunk * VOCAB)
    net, (prompts, responses) = model(kind), rows()
    labels = torch.tensor(sum(responses, []))
    assert packing.chunk_size(net) == chunk
    sizes = []

    def per_token(logits, at):
        sizes.append(len(logits))
        return -losses.token_logprobs(logits, labels[at]) * (at + 1)

    hidden = packing.response_hidden(net, range(5), prompts, responses)
    ours = packing.head_loss(net, hidden, per_token) / 7
    ours.backward()
    got = [p.grad.clone() for p in net.parameters()]
    assert max(sizes) == min(chunk, len(labels)) and sum(sizes) == len(labels)
    net.zero_grad()
    logits = torch.cat([alone(net, p, r) for p, r in zip(prompts, responses, strict=True)])
    theirs = (F.cross_entropy(logits, labels, reduction="none")
              * torch.arange(1, len(labels) + 1)).sum() / 7
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, p in zip(got, net.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=1e-4 * p.grad.abs().max().item())


def test_bf16_compute():
    """Under autocast the logits are bf16 and the sums over tokens float32, of weights too."""
    net = model("llama")
    net.compute_dtype = torch.bfloat16
    prompts, responses = rows()
    hidden = packing.response_hidden(net, range(5), prompts, responses)
    seen = []
    loss = packing.head_loss(net, hidden, lambda logits, at: seen.append(logits.dtype)
                             or logits.float().logsumexp(-1))
    loss.backward()
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


# ---- what an architecture can do -----------------------------------------------------------------

def test_probe():
    assert model("llama").note == model("gpt2").note == model("qwen3").note == ""
    note = model("gemma2").note
    assert note.startswith("Gemma2ForCausalLM: its head is no single linear layer")
    assert "no 4-D mask" in note
    eager = model("llama", attention="eager")  # its float mask is added, not selected
    assert eager.plain_head and not eager.can_pack and "siblings do not share" in eager.note
    prompts, responses = rows()
    assert len(packing.layout(prompts, responses, pack=eager.can_pack)[0]) == 5


# ---- micro-batches -------------------------------------------------------------------------------

@pytest.mark.parametrize("budget", [1, 12, 30, 60, 10**6])
def test_micro_batches(budget, monkeypatch):
    """Each row once; within the budget unless a row alone exceeds it; siblings together if they
    fit; the larger of student and teacher pass counts, a shared prompt once."""
    net, generator = model("llama"), torch.Generator().manual_seed(budget)
    monkeypatch.setattr(packing, "pairs_per_token", lambda net: float("inf"))
    prompts = [[i // 4] * (3 + 5 * (i // 4)) for i in range(16)]  # 4 groups, prompts of 3 to 18
    seen = [[100 + i] * (i if i % 3 else 0) or None for i in range(16)]  # some rows are no target
    responses = [[7] * int(torch.randint(1, 9, (), generator=generator)) for _ in range(16)]
    for passes, learning in (([prompts], list(range(16))),
                             ([prompts, seen], [i for i in range(16) if seen[i]])):
        batches = packing.micro_batches(net, learning, passes, responses, budget)
        assert sorted(sum(batches, [])) == learning

        def cost(batch, passes=passes):
            def fed(column):
                alone = [len(column[i]) + len(responses[i]) - 1 for i in batch]
                prompts = {tuple(column[i]) for i in batch}
                saved = sum(len(column[i]) for i in batch) - sum(map(len, prompts))
                return sum(alone) - saved if len(prompts) < len(batch) else len(batch) * max(alone)
            return max(map(fed, passes))

        for batch in batches:
            assert len(batch) == 1 or cost(batch) <= budget
        for group in range(4):  # what fits is not torn apart
            siblings = [i for i in learning if i // 4 == group]
            if cost(siblings) <= budget:
                assert any(set(siblings) <= set(batch) for batch in batches)
        assert len(batches) == 1 or budget < 10**6
        assert len(batches) == len(learning) or budget > 1
    assert packing.micro_batches(net, [], [prompts], responses, budget) == []


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("shape", [(20, 6), (3, 40), (19, 18)])
def test_a_micro_batch_holds_what_is_fed(pack, shape, monkeypatch):
    """Also on the plain path, with its padding, and where sharing is not worth it."""
    net, (prompt, most), draw = model("llama"), shape, torch.Generator().manual_seed(0)
    monkeypatch.setattr(packing, "pairs_per_token", lambda net: 60)
    prompts = [[i // 4] * prompt for i in range(16)]
    responses = [[7] * int(n) for n in torch.randint(1, most, (16,), generator=draw)]
    fed = []
    monkeypatch.setattr(net, "states", lambda input_ids, **_: (
        fed.append(input_ids.numel()), torch.zeros(*input_ids.shape, 1))[1])
    for budget in (60, 120, 10**6):
        fed.clear()
        batches = packing.micro_batches(net, range(16), [prompts], responses, budget, pack)
        for rows in batches:
            packing.response_hidden(net, rows, prompts, responses, pack)
        slack = 0 if not pack else max(map(len, responses)) * 4 + prompt  # of the last shared row
        assert sorted(sum(batches, [])) == list(range(16))
        assert all(n <= budget + slack or len(rows) == 1
                   for n, rows in zip(fed, batches, strict=True))


def test_tokens():
    """Rows, ids, log-probabilities and weights of the tokens that a mask keeps."""
    from rollout import Rollout
    rollouts = [Rollout(i, [1], ids, -torch.arange(len(ids)) - 10.0 * i, None, True, "")
                for i, ids in enumerate([[5, 6, 7], [8], [9, 4]])]
    rollouts[2].old = torch.tensor([7.0, 8.0])  # of another engine's rollout
    masks = [torch.tensor(m, dtype=torch.bool) for m in ([1, 0, 1], [1], [0, 1])]
    weights = {0: torch.tensor([1.0, 2, 3]), 1: torch.zeros(3), 2: torch.tensor([4.0, 5, 0])}
    row, label, old, sampled, weight, keep = packing.tokens(
        [2, 0], rollouts, masks, weights, "cpu")
    assert row.tolist() == [2, 0, 0] and label.tolist() == [4, 5, 7]
    assert old.tolist() == [8, 0, -2] and sampled.tolist() == [-21, 0, -2]
    assert weight.tolist() == [5, 1, 3]
    assert keep.tolist() == [False, True, True, False, True]
    assert [len(x) for x in packing.tokens([], rollouts, masks, weights, "cpu")] == [0] * 6
