"""losses.py against oracles written from the definitions in plain Python floats (float64).

The oracles below share nothing with losses.py: no torch, loops over lists. Gradients are checked by
gradcheck and, where float32 is the point, by central differences of the oracle.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import losses as L

INF = math.inf
CASES = {case["id"]: case for case in
         map(json.loads, (Path(__file__).parent / "rows" / "cases.jsonl").open())}
F64 = torch.float64


def tensor(values, dtype=F64, grad=False):
    return torch.tensor(values, dtype=dtype, requires_grad=grad)


# ---- oracles -------------------------------------------------------------------------------------

def softmax(logits):
    top = max(logits)
    e = [math.exp(x - top) for x in logits]
    return [x / math.fsum(e) for x in e]


def kl(p, q):
    """0 log 0 = 0; inf where q has no mass under p's."""
    return math.fsum(a * (math.log(a) - math.log(b)) if b > 0 else INF
                     for a, b in zip(p, q) if a > 0)


def oracle_jsd(s, t, beta=0.5, topk=0, tail=True):
    p, q = softmax(s), softmax(t)
    if 0 < topk < len(s):
        order = sorted(range(len(s)), key=lambda v: -s[v])
        head, rest = order[:topk], order[topk:]
        out = []
        for x in (p, q):
            kept, outside = [x[v] for v in head], math.fsum(x[v] for v in rest)
            mass = math.fsum(kept)
            out.append(kept + [outside] if tail else [v / mass for v in kept])
        p, q = out
    if beta == 0:
        return kl(q, p)
    if beta == 1:
        return kl(p, q)
    m = [(1 - beta) * a + beta * b for a, b in zip(p, q)]
    return (1 - beta) * kl(p, m) + beta * kl(q, m)


def oracle_grad(function, x, h=1e-5):
    """Central differences of a function of a list."""
    return [(function(x[:i] + [x[i] + h] + x[i + 1:]) - function(x[:i] + [x[i] - h] + x[i + 1:]))
            / (2 * h) for i in range(len(x))]


def oracle_policy_loss(lp, old, advantages, mask, low, high):
    out = []
    for i, a in enumerate(advantages):
        out.append([])
        for t in range(len(lp[i])):
            if not mask[i][t]:
                out[-1].append(0.0)
                continue
            rho = math.exp(lp[i][t] - old[i][t])
            out[-1].append(-min(rho * a, min(max(rho, 1 - low), 1 + high) * a))
    return out


def oracle_advantages(rewards, size, std):
    out = []
    for start in range(0, len(rewards), size):
        r = rewards[start:start + size]
        mean = math.fsum(r) / size
        dev = math.sqrt(math.fsum((x - mean) ** 2 for x in r) / (size - 1)) if size > 1 else 0.0
        flat = all(x == r[0] for x in r)
        out += [0.0 if flat else (x - mean) / ((dev + 1e-6) if std else 1) for x in r]
    return out


# ---- strategies: rows of logits, -inf among them -------------------------------------------------

LOGIT = st.floats(-40, 40, width=32).map(lambda x: round(x, 3))
MASKED = st.one_of(LOGIT, LOGIT, LOGIT, st.just(-INF))


@st.composite
def logit_pairs(draw, element=MASKED):
    """Two rows over one vocabulary; no -inf-only row; the student's finite logits are distinct
    (which of two tied tokens is among the K largest is a convention)."""
    v = draw(st.integers(2, 9))
    s, t = (draw(st.lists(element, min_size=v, max_size=v)) for _ in range(2))
    s = [x + 1e-3 * i for i, x in enumerate(s)]
    for row in (s, t):
        if max(row) == -INF:
            row[draw(st.integers(0, v - 1))] = 0.5
    return s, t


FAST = settings(max_examples=60, deadline=None, derandomize=True)
BETAS = (0.0, 0.05, 0.3, 0.5, 0.9, 1.0)


# ---- generalised JSD -----------------------------------------------------------------------------

@FAST
@given(logit_pairs(LOGIT), st.sampled_from(BETAS), st.integers(0, 10), st.booleans())
def test_jsd_equals_the_definition(pair, beta, topk, tail):
    s, t = pair
    want = oracle_jsd(s, t, beta, topk, tail)
    got = L.generalized_jsd(tensor(s), tensor(t), beta, topk, tail)
    assert got.item() == pytest.approx(want, rel=1e-9, abs=1e-12)
    got = L.generalized_jsd(tensor(s, torch.float32), tensor(t, torch.float32), beta, topk, tail)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(want, rel=2e-5, abs=2e-6)


@FAST
@given(logit_pairs(), st.sampled_from(BETAS[1:-1]), st.integers(0, 10), st.booleans(),
       st.sampled_from((torch.float32, F64)))
def test_jsd_is_finite_whatever_the_supports(pair, beta, topk, tail, dtype):
    s, t = tensor(pair[0], dtype, grad=True), tensor(pair[1], dtype)
    value = L.generalized_jsd(s, t, beta, topk, tail)
    value.backward()
    assert value.isfinite() and s.grad.isfinite().all()
    assert abs(s.grad.sum().item()) < 1e-5                       # a shift of all logits is nothing
    renormalised_away = not tail and 0 < topk < len(pair[0])  # the teacher may have no mass there
    if not renormalised_away:
        want = oracle_jsd(*pair, beta, topk, tail)
        assert value.item() == pytest.approx(want, rel=2e-5, abs=2e-6)


@FAST
@given(logit_pairs())
def test_jsd_bounds_symmetry_and_coarsening(pair):
    s, t = map(tensor, pair)
    d = L.generalized_jsd(s, t).item()
    assert 0 <= d <= math.log(2) + 1e-12
    assert d == pytest.approx(L.generalized_jsd(t, s).item(), abs=1e-12)
    for beta in BETAS:
        assert L.generalized_jsd(s, s, beta).item() == 0
    for dtype in (F64, torch.float32):  # merging tokens into a tail cannot add distance
        top = L.generalized_jsd(s.to(dtype), t.to(dtype), topk=1).item()
        assert -1e-12 <= top <= d + 1e-6
    v = len(pair[0])
    for k in (v, v + 3):
        assert L.generalized_jsd(s, t, topk=k).item() == d
    last = L.generalized_jsd(s, t, topk=v - 1, tail=True).item()  # a tail of one token is it
    assert last == pytest.approx(d, abs=1e-12)


@pytest.mark.parametrize("topk,tail", [(0, True), (3, True), (3, False), (9, True)])
@pytest.mark.parametrize("beta", BETAS)
def test_jsd_gradient(beta, topk, tail):
    generator = torch.Generator().manual_seed(1)
    s, t = (3 * torch.randn(2, 3, 6, generator=generator, dtype=F64) for _ in range(2))
    s.requires_grad_(), t.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: L.generalized_jsd(x, t.detach(), beta, topk, tail), s, atol=1e-7)
    L.generalized_jsd(s, t, beta, topk, tail).sum().backward()
    assert t.grad is None                             # none through the teacher


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("gap", [14.0, 20.0, 40.0])
def test_topk_sum_that_rounds_to_one_keeps_a_live_tail(beta, gap):
    """The student's top token has p = 1 - 6e-6 .. 1 - 3e-17: in float32 its log is about 0, so
    log(1 - sum) would be rounding noise or -inf. Value and gradient must be float64's."""
    s, t = [gap, 0.0, -1.0, -2.0], [0.0, 1.0, -1.0, 2.0]
    x = tensor(s, torch.float32, grad=True)
    value = L.generalized_jsd(x, tensor(t, torch.float32), beta, topk=1)
    value.backward()
    assert value.item() == pytest.approx(oracle_jsd(s, t, beta, 1), rel=1e-5)
    want = oracle_grad(lambda row: oracle_jsd(row, t, beta, 1), s)
    # The tail one by one (below 1e-9 the oracle's differences are noise); the head is minus their
    # sum, a difference of terms of size 1 in float32.
    assert x.grad[1:].tolist() == pytest.approx(want[1:], rel=1e-3, abs=1e-9)
    assert x.grad[0].item() == pytest.approx(want[0], rel=1e-3, abs=1e-6)
    if beta == 0:
        assert x.grad[1:].max() < -1e-3               # forward KL pulls the tail up, hard


def test_empty_tails():
    """An empty tail on both sides adds nothing and breaks nothing, in value and in gradient."""
    s = tensor([2.0, 1.0, -INF, -INF], torch.float32, grad=True)
    t = tensor([0.5, 1.0, -INF, -INF], torch.float32)
    for beta in BETAS:
        s.grad = None
        value = L.generalized_jsd(s, t, beta, topk=2)
        value.backward()
        assert value.item() == pytest.approx(oracle_jsd([2.0, 1.0], [0.5, 1.0], beta), abs=1e-6)
        want = oracle_grad(lambda row, b=beta: oracle_jsd(row, [0.5, 1.0], b), [2.0, 1.0])
        assert s.grad.tolist() == pytest.approx([*want, 0.0, 0.0], abs=1e-6)


def test_end_points_are_infinite_only_where_the_definition_is():
    s, t = tensor([1.0, -INF, 0.0], grad=True), tensor([1.0, 2.0, -INF])
    assert L.generalized_jsd(s, t, 0).item() == INF               # p_T has mass where p_S has none
    assert L.generalized_jsd(s, t, 1).item() == INF               # and the other way round
    one, both = tensor([0.0, -INF, -INF]), tensor([0.0, 1.0, 1.0])
    assert L.generalized_jsd(one, both, 0, topk=1).item() == INF  # an empty tail is a probability 0
    assert L.generalized_jsd(both, one, 1, topk=2).item() == INF
    same = tensor([0.0, 2.0, -INF])
    wide = tensor([1.0, 2.0, 0.5], grad=True)
    value = L.generalized_jsd(wide, same, 0)  # KL(T || S): T's support inside S's
    value.backward()
    assert value.item() == pytest.approx(oracle_jsd([1.0, 2.0, 0.5], [0.0, 2.0, -INF], 0))
    assert wide.grad.isfinite().all()


def test_near_equal_distributions_keep_their_digits_in_float32():
    """JSD is then of second order in the gap; a float32 log-mixture leaves no digit of it."""
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(500, generator=generator) * 3
    t = s + 3e-4 * torch.randn(500, generator=generator)
    for beta in (0.05, 0.5, 0.9):
        want = oracle_jsd(s.tolist(), t.tolist(), beta)
        assert 0 < want < 1e-7
        assert L.generalized_jsd(s, t, beta).item() == pytest.approx(want, rel=0.02)


def test_bf16_logits_are_computed_in_float32():
    generator = torch.Generator().manual_seed(0)
    s = (torch.randn(4, 300, generator=generator) * 3).bfloat16()
    t = (s + 0.05 * torch.randn(4, 300, generator=generator)).bfloat16()
    got = L.generalized_jsd(s, t)
    want = [oracle_jsd(a, b) for a, b in zip(s.tolist(), t.tolist())]
    assert got.dtype == torch.float32 and got.tolist() == pytest.approx(want, rel=1e-4)
    logprobs, entropy = L.logprobs_and_entropy(s, torch.arange(4))
    assert torch.equal(L.token_logprobs(s, torch.arange(4)), logprobs)
    p = [softmax(row) for row in s.tolist()]
    assert logprobs.tolist() == pytest.approx([math.log(p[i][i]) for i in range(4)], rel=1e-6)
    assert entropy.tolist() == pytest.approx([-math.fsum(x * math.log(x) for x in r) for r in p],
                                             rel=1e-5)
    s.requires_grad_()
    L.generalized_jsd(s, t).sum().backward()
    assert s.grad.dtype == torch.bfloat16


def test_jsd_keeps_two_tensors_of_vocabulary_size():
    """Plain autograd keeps about ten; with V = 151,936 that decides what fits."""
    s, t = torch.randn(8, 1000, requires_grad=True), torch.randn(8, 1000)
    kept = {}

    def pack(x):
        if x.numel() >= s.numel():
            kept[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        L.generalized_jsd(s, t).sum().backward()
    assert len(kept) == 2


def test_jsd_refuses_what_it_cannot_mean():
    x = torch.zeros(2, 3)
    for bad in ({"beta": -0.1}, {"beta": 1.5}, {"topk": -1}):
        with pytest.raises(ValueError):
            L.generalized_jsd(x, x, **bad)
    with pytest.raises(ValueError):                   # would broadcast to nonsense
        L.generalized_jsd(x, torch.zeros(1, 3))


# ---- GRPO ----------------------------------------------------------------------------------------

@FAST
@given(st.integers(1, 5), st.data(), st.booleans())
def test_group_advantages_equal_the_definition(size, data, std):
    groups = data.draw(st.integers(1, 3))
    rewards = data.draw(st.lists(st.sampled_from((0.0, 0.3, 0.99, 1.0)),
                                 min_size=size * groups, max_size=size * groups))
    got = L.group_advantages(tensor(rewards), size, std)
    want = oracle_advantages(rewards, size, std)
    assert got.tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert [g == 0 for g in got] == [w == 0 for w in want]        # equal groups exactly 0
    single = L.group_advantages(tensor(rewards, torch.float32), size, std)
    assert single.tolist() == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_group_advantages_refuses_broken_groups_and_shows_nan():
    with pytest.raises(ValueError):
        L.group_advantages(torch.zeros(5), 2)
    assert L.group_advantages(torch.tensor([1, 0]), 2).dtype == torch.float32
    assert L.group_advantages(tensor([math.nan, 1, 0, 1]), 2).isnan().tolist() == [True] * 2 + [
        False] * 2                                    # a broken reward stays visible, in its group


MASKS = {"bool": torch.bool, "int64": torch.int64, "uint8": torch.uint8, "float32": torch.float32}


@pytest.mark.parametrize("mask_dtype", MASKS.values(), ids=MASKS.keys())
def test_policy_gradient_loss_equals_the_definition(mask_dtype):
    generator = torch.Generator().manual_seed(3)
    lp, old = (-3 * torch.rand(6, 5, generator=generator, dtype=F64) for _ in range(2))
    lp[0], old[1, 0] = old[0], lp[1, 0] + 30          # on policy; and a ratio of e^-30
    mask = torch.rand(6, 5, generator=generator) > 0.3
    a = tensor([1.5, -0.7, 0.0, 2.0, -1.0, 0.3])
    lp.requires_grad_()
    args = (old, a, mask.to(mask_dtype), 0.2, 0.28)
    got = L.policy_gradient_loss(lp, *args)
    want = oracle_policy_loss(lp.tolist(), old.tolist(), a.tolist(), mask.tolist(), 0.2, 0.28)
    assert got.shape == (6, 5) and torch.allclose(got, tensor(want), rtol=1e-12, atol=1e-14)
    lp.data += 1e-3                                   # off the kink at rho = 1 -+ eps
    assert torch.autograd.gradcheck(lambda x: L.policy_gradient_loss(x, *args), lp)
    got = L.policy_gradient_loss(lp, *args)
    got.sum().backward()
    clipped = L.clipped_tokens(lp, *args)
    live = mask & (a != 0).unsqueeze(1)
    assert clipped.any() and torch.equal(clipped, live & (lp.grad == 0))


def test_clip_bounds_are_one_sided():
    """A > 0 is clipped above 1 + eps_high only, A < 0 below 1 - eps_low only (PPO's minimum)."""
    ratio, mask = tensor([[0.5, 0.9, 1.2, 1.5]] * 2), torch.ones(2, 4)
    lp = ratio.log().requires_grad_()
    a = tensor([2.0, -2.0])
    loss = L.policy_gradient_loss(lp, torch.zeros(2, 4), a, mask)
    assert torch.allclose(loss, tensor([[-1.0, -1.8, -2.4, -2.56], [1.6, 1.8, 2.4, 3.0]]))
    loss.sum().backward()
    assert (lp.grad == 0).tolist() == [[False, False, False, True], [True, False, False, False]]


def test_kl_k3_equals_the_definition():
    lp, ref = tensor([-2.0, -1.0, -1.0, -3.0]), tensor([-1.0, -2.0, -1.0, -3.0 + 1e-5])
    want = [math.exp(r - p) - (r - p) - 1 for p, r in zip(lp.tolist(), ref.tolist())]
    assert L.kl_k3(lp, ref).tolist() == pytest.approx(want, rel=1e-4, abs=1e-15)
    small = L.kl_k3(torch.zeros(1), torch.tensor([1e-4])).item()  # exp(d) - d - 1 is 0 in float32
    assert small == pytest.approx(0.5e-8, rel=1e-3)
    assert torch.autograd.gradcheck(lambda x: L.kl_k3(x, ref), lp.requires_grad_())


def test_importance_weight_is_clipped_and_detached():
    lp, old = tensor([0.0, -1.0, 500.0], torch.float32, True), torch.tensor([-0.5, 0.0, -500.0])
    weight = L.importance_weight(lp, old, 2.0)
    assert weight.tolist() == pytest.approx([math.exp(0.5), math.exp(-1), 2.0])
    assert not weight.requires_grad


def test_logprobs_and_entropy_with_minus_inf_logits():
    logits = tensor([[1.0, -INF, 0.0], [-INF, 3.0, -INF]], torch.float32, grad=True)
    logprobs, entropy = L.logprobs_and_entropy(logits, torch.tensor([0, 1]))
    p = softmax([1.0, 0.0])
    assert logprobs.tolist() == pytest.approx([math.log(p[0]), 0.0], abs=1e-6)
    assert entropy.tolist() == pytest.approx([-sum(x * math.log(x) for x in p), 0.0], abs=1e-6)
    logprobs.sum().backward()
    assert logits.grad.isfinite().all() and not entropy.requires_grad


# ---- selection, aggregation ----------------------------------------------------------------------

@pytest.mark.parametrize("poison", [math.nan, -INF, INF])
def test_excluded_positions_leak_nothing(poison):
    """Whatever stands off the mask, values and gradients are those of the clean columns."""
    lp, old = tensor([[-1.0, -2.0], [-0.5, -1.5]]), tensor([[-1.2, -1.9], [-0.7, -1.0]])
    junk = torch.full((2, 2), poison, dtype=F64)
    mask = torch.tensor([[1, 1, 0, 0]] * 2)
    a = tensor([1.0, -1.0])
    clean, dirty = lp.clone().requires_grad_(), torch.cat([lp, junk], 1).requires_grad_()
    dirty_old = torch.cat([old, junk], 1)
    total = []
    for x, o, m in ((clean, old, mask[:, :2]), (dirty, dirty_old, mask)):
        total.append(L.token_mean(L.policy_gradient_loss(x, o, a, m), m))
        total[-1].backward()
        assert not L.clipped_tokens(x, o, a, m)[:, 2:].any()
    assert total[0].item() == pytest.approx(total[1].item(), rel=1e-12)
    assert torch.allclose(dirty.grad[:, :2], clean.grad, rtol=1e-12)
    assert (dirty.grad[:, 2:] == 0).all()


def test_overflowing_ratio_of_a_row_without_advantage():
    lp = tensor([[0.0], [0.0]], torch.float32, grad=True)
    loss = L.policy_gradient_loss(lp, torch.full((2, 1), -200.0), torch.zeros(2), torch.ones(2, 1))
    loss.sum().backward()
    assert (loss == 0).all() and (lp.grad == 0).all()             # 0 * exp(200), not nan


def test_token_mean():
    values, mask = tensor([[1.0, 2.0], [math.nan, 4.0]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert L.token_mean(values, mask).item() == pytest.approx(7 / 3)
    assert L.token_mean(values, mask, total=14).item() == 0.5
    assert L.token_mean(values, mask, total=torch.tensor(14.0)).item() == 0.5
    assert L.token_mean(values.half(), mask).dtype == torch.float32


@pytest.mark.parametrize("agg", ["token", "seq"])
def test_aggregation_does_not_depend_on_the_split(agg):
    """Micro-batches of 1, 2, 3 and all, in any order and with any padding: one number; and a
    denominator 1% off, a dropped row or a mask shifted by one is seen."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(5, 6, generator=generator, dtype=F64)
    lengths = [3, 6, 0, 1, 4]
    mask = torch.arange(6).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
    rows = [v[:n].tolist() for v, n in zip(values, lengths)]
    flat = [x for row in rows for x in row]
    want = (math.fsum(flat) / len(flat) if agg == "token" else
            math.fsum(math.fsum(r) / len(r) for r in rows if r) / 4)

    def total(values, mask, batches, scale=1.0):
        pieces = [L.aggregate_weights(mask[b], agg, F64) for b in batches]
        summed = sum((w * torch.where(mask[b], values[b], 0)).sum() for (w, _), b in
                     zip(pieces, batches))
        return (summed / (scale * sum(share for _, share in pieces))).item()

    splits = ([[0, 1, 2, 3, 4]], [[4, 2], [0, 1, 3]], [[i] for i in range(5)], [[2], [3, 1, 0, 4]])
    for batches in splits:
        assert total(values, mask, batches) == pytest.approx(want, rel=1e-12)
    padded = torch.nn.functional.pad(values, (0, 3), value=math.nan)
    wide = torch.nn.functional.pad(mask, (0, 3))
    assert total(padded, wide, splits[1]) == pytest.approx(want, rel=1e-12)
    for wrong in (total(values, mask, splits[0], 1.01), total(values, mask, [[0, 1, 2, 4]]),
                  total(values, mask.roll(1, 1), splits[0])):
        assert wrong != pytest.approx(want, rel=1e-4)
    with pytest.raises(ValueError):
        L.aggregate_weights(mask, "mean")


def test_flat_tokens_are_rows_of_one():
    generator = torch.Generator().manual_seed(1)
    lp, old = (-torch.rand(40, generator=generator, dtype=F64) for _ in range(2))
    a = torch.randn(40, generator=generator, dtype=F64).round()          # some are 0
    ones = torch.ones(40, 1)
    rows = lp[:, None], old[:, None], a, ones
    assert torch.equal(L.policy_gradient_loss(lp, old, a), L.policy_gradient_loss(*rows)[:, 0])
    cut = L.clipped_tokens(lp, old, a)
    assert torch.equal(cut, L.clipped_tokens(*rows)[:, 0]) and cut.any() and not cut[a == 0].any()


def test_inputs_are_never_modified():
    generator = torch.Generator().manual_seed(0)
    s, t = (torch.randn(2, 3, 5, generator=generator) for _ in range(2))
    s[0, 0, 0] = -INF
    lp, old = (-torch.rand(2, 3, generator=generator) for _ in range(2))
    labels, mask = torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 0], [1, 0, 0]])
    a, r = torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0])
    inputs = (s, t, lp, old, labels, mask, a, r)
    before = [x.clone() for x in inputs]
    for beta in BETAS:
        for topk, tail in ((0, True), (2, True), (2, False)):
            L.generalized_jsd(s, t, beta, topk, tail)
    L.logprobs_and_entropy(s, labels), L.group_advantages(r, 2), L.kl_k3(lp, old)
    L.policy_gradient_loss(lp, old, a, mask), L.clipped_tokens(lp, old, a, mask)
    L.importance_weight(lp, old, 2.0), L.token_mean(lp, mask)
    L.aggregate_weights(mask, "seq")
    assert all(torch.equal(x, y) for x, y in zip(inputs, before))


# ---- the shared cases, by id ---------------------------------------------------------------------

def l01(given, expected):
    rows = given["token_losses"]
    values = torch.tensor([row + [99.0] * (3 - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (3 - len(row)) for row in rows])
    for mode, agg in (("token-mean", "token"), ("seq-mean", "seq")):
        weights, share = L.aggregate_weights(mask, agg)
        assert (weights * values).sum().item() / share == pytest.approx(expected[mode])
    assert L.token_mean(values, mask).item() == expected["token-mean"]


def l05(given, expected):
    lp = torch.zeros(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3)
    for total in (None, 0, torch.tensor(0.0)):
        per_token = L.policy_gradient_loss(lp, lp.detach(), torch.ones(2), mask)
        loss = L.token_mean(per_token, mask, total)
        loss.backward()                               # a backward pass exists: no rank leaves
        assert loss.item() == expected["loss"] and (lp.grad == 0).all()
    for agg in ("token", "seq"):
        weights, share = L.aggregate_weights(mask, agg)
        assert weights.isfinite().all() and share == 0


def l10(given, expected):
    # Hand-made softmax table: row t holds the distribution AFTER token t.
    table = [[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.6, 0.3, 0.1]]
    ids = torch.tensor(given["ids"])
    logprobs, _ = L.logprobs_and_entropy(tensor(table)[:-1].log() + 7, ids[1:])
    assert logprobs.tolist() == pytest.approx([math.log(0.3), math.log(0.1)])


def l11(given, expected):
    logits = tensor(given["logits"]) / given["temperature"]
    logprob, _ = L.logprobs_and_entropy(logits, torch.tensor(given["sampled"]))
    assert logprob.item() == pytest.approx(expected["logp"], abs=1e-5)


def l13(given, expected):
    # No sequence cap here: the ratio is clipped per token, and every token stays in the loss.
    lp = torch.full((1, given["tokens"]), given["mean_logp_gap"])
    weights = L.importance_weight(lp, torch.zeros_like(lp), 2.0)
    assert weights.log().sum().exp().item() == pytest.approx(expected["sequence_ratio"], abs=1e-2)
    assert weights.max() < 2.0 and (weights > 0).all()


def l14(given, expected):
    policy, ref = tensor(given["logp_policy"]), tensor(given["logp_ref"])
    assert L.kl_k3(policy, ref).item() == pytest.approx(expected["k3"], abs=1e-4)
    assert L.kl_k3(ref, policy).item() == pytest.approx(expected["reversed_would_give"], abs=1e-4)


def l15(given, expected):
    """By enumeration of the 3 tokens: k3's value is KL(theta||ref), its gradient KL(ref||theta)'s;
    the k1 loss, which losses.py does not offer, has expected gradient 0."""
    logits, ref = tensor([0.3, -0.5, 1.1], grad=True), tensor([-0.2, 0.4, 0.1])
    p, q = softmax(logits.tolist()), softmax(ref.tolist())
    logp = logits.log_softmax(-1)
    k3 = L.kl_k3(logp, ref.log_softmax(-1))
    assert (tensor(p) * k3).sum().item() == pytest.approx(kl(p, q))
    grad, = torch.autograd.grad((tensor(p) * k3).sum(), logits, retain_graph=True)
    of_reverse = oracle_grad(lambda x: kl(q, softmax(x)), logits.tolist())
    of_exact = oracle_grad(lambda x: kl(softmax(x), q), logits.tolist())
    assert grad.tolist() == pytest.approx(of_reverse, abs=1e-8)
    assert grad.tolist() != pytest.approx(of_exact, abs=1e-3)
    grad, = torch.autograd.grad((tensor(p) * (logp - ref.log_softmax(-1))).sum(), logits)
    assert grad.abs().max().item() == pytest.approx(expected["expected_gradient_of_k1_loss"])


def l16(given, expected):
    for std in (True, False):
        assert L.group_advantages(tensor(given["rewards"]), given["group"], std).tolist() == \
            expected["advantages"]


def l17(given, expected):
    for value in (given["rewards"][0], 0.99, 1 / 3, 0.1):
        rewards = torch.full((7,), value)
        assert L.group_advantages(rewards, 7).abs().max() == 0
    # Rewards that differ in the last bit alone are not equal; eps keeps them small.
    rewards = tensor([0.1 + 0.2, 0.3, 0.3])
    assert L.group_advantages(rewards, 3).abs().max() <= expected["max_abs_advantage"]


def l18(given, expected):
    a = L.group_advantages(tensor(given["rewards"]).view(-1), 2).view(2, 2)
    assert a[1].tolist() == expected["group2_advantages"] and a[0, 0] > 0 > a[0, 1]
    assert a[0].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)


def l21(given, expected):
    """At ratio 1 the loss is 0 and the gradient is not."""
    a = L.group_advantages(tensor(given["rewards"]), 4)
    logits = torch.zeros(4, 3, 5, dtype=F64, requires_grad=True)
    lp, _ = L.logprobs_and_entropy(logits, torch.arange(12).view(4, 3) % 5)
    mask = torch.ones(4, 3)
    loss = L.token_mean(L.policy_gradient_loss(lp, lp.detach(), a, mask), mask)
    loss.backward()
    assert abs(loss.item()) < 1e-12 and logits.grad.norm() > 0.1


def l22(given, expected):
    """One SGD step raises the winner's log-probability and lowers the losers'."""
    table = torch.zeros(6, requires_grad=True)
    tokens = torch.tensor([[0], [1], [2], [3]])
    a = L.group_advantages(tensor(given["rewards"]), 4)

    def logprobs():
        return L.logprobs_and_entropy(table.expand(4, 1, 6), tokens)[0]

    old = logprobs().detach()
    mask = torch.ones(4, 1)
    L.token_mean(L.policy_gradient_loss(logprobs(), old, a, mask), mask).backward()
    with torch.no_grad():
        table -= 0.1 * table.grad
    change = (logprobs() - old).view(-1)
    assert change[0] > 0 and (change[1:] < 0).all()


def s07(given, expected):
    t, s = (tensor(given[k]).log() for k in "TS")
    for beta, key in ((0, "beta0"), (0.5, "beta0.5"), (1, "beta1"), (0.9, "beta0.9_paper_formula")):
        assert L.generalized_jsd(s, t, beta).item() == pytest.approx(expected[key], abs=1e-4)
    # The end points are the limits of D_beta/beta and D_beta/(1-beta), as the docstring says.
    assert L.generalized_jsd(s, t, 1e-6).item() / 1e-6 == pytest.approx(expected["beta0"], abs=1e-4)
    assert L.generalized_jsd(s, t, 1 - 1e-6).item() / 1e-6 == pytest.approx(expected["beta1"],
                                                                            abs=1e-4)


def s08(given, expected):
    t, s = (tensor(given[k], torch.float32).log() for k in "TS")
    loss = L.generalized_jsd(s, t, given["beta"]).item()
    assert loss == pytest.approx(expected["loss"], abs=1e-4)


def s12(given, expected):
    """The half of the case that is a loss: the same logits give 0 and 0. tests/test_teacher.py has
    the other half, with a model and a longer teacher prompt."""
    s = (20 * torch.randn(3, 200, generator=torch.Generator().manual_seed(0))).requires_grad_()
    for beta in BETAS:
        for topk, tail in ((0, True), (10, True), (10, False)):
            loss = L.generalized_jsd(s, s.detach(), beta, topk, tail).sum()
            grad, = torch.autograd.grad(loss, s)
            assert loss.item() == expected["loss"] and grad.norm() < 1e-6


def s22(given, expected):
    values, mask = torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    whole = L.token_mean(values, mask)
    split = sum(L.token_mean(values[i], mask[i], total=mask.sum()) for i in range(2))
    assert whole.item() == split.item() == 2.0


CHECKS = {name.upper(): check for name, check in list(globals().items())
          if name.upper() in CASES and callable(check)}


@pytest.mark.parametrize("case", CHECKS)
def test_case(case):
    CHECKS[case](CASES[case]["input"], CASES[case]["expected"])


# ---- parity with TRL 1.16 ------------------------------------------------------------------------

@pytest.fixture(scope="module")
def trl():
    """TRL's own loss code, or a skip that says why (it is a test extra, not a dependency)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        try:
            from trl import GRPOTrainer
            from trl.experimental.gkd.gkd_trainer import GKDTrainer
            from trl.experimental.sdpo import loss_utils
            from trl.trainer.utils import selective_log_softmax_and_entropy
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"TRL cannot be imported: {error}")
    return SimpleNamespace(grpo=GRPOTrainer._compute_loss, gkd=GKDTrainer.generalized_jsd_loss,
                           sdpo=loss_utils, logprobs=selective_log_softmax_and_entropy)


def random_logits(seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return [(2 * torch.randn(3, 4, 11, generator=generator)).to(dtype) for _ in range(2)]


def value_and_grad(function, x):
    x = x.clone().requires_grad_()
    value = function(x)
    value.sum().backward()
    return value.detach(), x.grad


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_trl_divergences_agree(trl, beta):
    s, t = random_logits()
    mine, grad = value_and_grad(lambda x: L.generalized_jsd(x, t, beta), s)
    gkd, gkd_grad = value_and_grad(lambda x: trl.gkd(x, t, beta=beta, reduction="sum"), s)
    assert mine.sum().item() == pytest.approx(gkd.item(), rel=1e-6)
    assert torch.allclose(grad, gkd_grad, atol=1e-6)
    theirs, _ = value_and_grad(lambda x: trl.sdpo.compute_full_logit_self_distillation_loss(
        x, t, distillation_alpha=beta), s)
    assert torch.allclose(mine, theirs, atol=1e-6)
    for tail in (True, False):
        mine, grad = value_and_grad(lambda x, k=tail: L.generalized_jsd(x, t, beta, 4, k), s)
        theirs, their_grad = value_and_grad(
            lambda x, k=tail: trl.sdpo.compute_topk_self_distillation_loss(
                x, t, distillation_topk=4, distillation_alpha=beta, distillation_add_tail=k), s)
        assert torch.allclose(mine, theirs, atol=1e-6)
        assert torch.allclose(grad, their_grad, atol=1e-6)


def test_trl_divergences_differ_where_the_tail_is_small(trl):
    """TRL's tail is 1 minus the top-K sum, with that sum held below 1 - 1e-7: once the head is that
    sure the tail is the constant 1e-7, its gradient 0. Ours is a logsumexp of what is outside."""
    s, t = [20.0, 0.0, -1.0, -2.0], [0.0, 1.0, -1.0, 2.0]
    want = oracle_grad(lambda row: oracle_jsd(row, t, 0.0, 1), s)
    x, y = tensor(s, torch.float32), tensor(t, torch.float32)
    _, grad = value_and_grad(lambda z: L.generalized_jsd(z, y, 0.0, 1), x)
    _, theirs = value_and_grad(lambda z: trl.sdpo.compute_topk_self_distillation_loss(
        z, y, distillation_topk=1, distillation_alpha=0.0, distillation_add_tail=True), x)
    assert grad.tolist() == pytest.approx(want, rel=1e-3)
    assert theirs.abs().max() < 0.1 * max(map(abs, want))         # the pull on the tail is gone


def test_trl_divergences_differ_with_minus_inf_and_in_bf16(trl):
    """-inf - -inf makes theirs nan; and theirs computes in the dtype of the logits."""
    s, t = tensor([1.0, 0.5, -INF], torch.float32), tensor([0.2, 0.5, -INF], torch.float32)
    theirs = trl.sdpo.compute_full_logit_self_distillation_loss(s, t, distillation_alpha=0.5)
    mine = L.generalized_jsd(s, t).item()
    assert theirs.isnan() and mine == pytest.approx(oracle_jsd([1.0, 0.5], [0.2, 0.5]), abs=1e-6)
    s, t = random_logits(dtype=torch.bfloat16)
    want = tensor([[oracle_jsd(a, b) for a, b in zip(x, y)]
                   for x, y in zip(s.tolist(), t.tolist())])
    theirs = trl.sdpo.compute_full_logit_self_distillation_loss(s, t, distillation_alpha=0.5)
    assert (L.generalized_jsd(s, t) - want).abs().max() < 1e-6
    assert (theirs - want).abs().max() > 1e-4


def test_trl_logprobs_and_importance_weights_agree(trl):
    logits, _ = random_logits()
    labels = torch.arange(12).view(3, 4) % 11
    for mine, theirs in zip(L.logprobs_and_entropy(logits, labels), trl.logprobs(logits, labels)):
        assert torch.allclose(mine, theirs, atol=1e-6)
    lp, old = -torch.rand(3, 4), -3 * torch.rand(3, 4)
    theirs = trl.sdpo.apply_importance_sampling_clipping(torch.ones(3, 4), lp, old, 2.0)
    assert torch.allclose(L.importance_weight(lp, old, 2.0), theirs, atol=1e-6)


def trl_grpo(trl, lp, old, ref, a, mask, loss_type, kl_coef):
    """GRPOTrainer._compute_loss on given log-probabilities, with everything around it stubbed."""
    identity = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x)
    metrics = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kw: (lp, torch.zeros_like(lp), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", beta=kl_coef, loss_type=loss_type, epsilon_low=0.2,
        epsilon_high=0.28, use_vllm=False, current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False, accelerator=identity, _metrics=metrics,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False))
    ids = torch.zeros(lp.shape, dtype=torch.long)
    loss = trl.grpo(trainer, None, {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask,
        "advantages": a, "old_per_token_logps": old, "ref_per_token_logps": ref})
    return loss, metrics["train"]["clip_ratio/region_mean"][0]


@pytest.mark.parametrize("agg,loss_type", [("token", "bnpo"), ("seq", "grpo")])
def test_trl_grpo_agrees(trl, agg, loss_type):
    """bnpo is --agg token and grpo --agg seq, of one batch on one rank with no empty row. TRL's
    bnpo takes the token mean per micro-batch, so its gradient depends on the micro-batch size and
    on the ranks; ours is divided once by the global count. Its grpo averages over ALL rows, ours
    over those with a token: a row without one is no observation. Its advantages add 1e-4, not
    1e-6, to the std, and divide the rounding residue of equal rewards by it; ours are exactly 0."""
    generator = torch.Generator().manual_seed(2)
    lp, old, ref = (-2 * torch.rand(4, 6, generator=generator) for _ in range(3))
    mask = (torch.arange(6) < torch.tensor([[6], [2], [4], [1]])).long()
    a = torch.tensor([1.2, -0.4, 0.0, -0.8])

    def mine(x, mask=mask):
        per_token = L.policy_gradient_loss(x, old, a, mask) + 0.1 * L.kl_k3(x, ref)
        weights, share = L.aggregate_weights(mask, agg)
        return (weights * per_token).sum() / share

    value, grad = value_and_grad(mine, lp)
    theirs, their_grad = value_and_grad(
        lambda x: trl_grpo(trl, x, old, ref, a, mask, loss_type, 0.1)[0], lp)
    assert value.item() == pytest.approx(theirs.item(), abs=1e-6)
    assert torch.allclose(grad, their_grad, atol=1e-6)
    clip = L.token_mean(L.clipped_tokens(lp, old, a, mask), mask).item()
    assert 0 < clip == pytest.approx(trl_grpo(trl, lp, old, ref, a, mask, loss_type, 0.1)[1])
    if agg == "seq":
        mask = mask.clone()
        mask[3] = 0                                   # one row loses its only token: 4 rows or 3
        theirs = trl_grpo(trl, lp, old, ref, a, mask, loss_type, 0.1)[0]
        assert mine(lp, mask).item() == pytest.approx(theirs.item() * 4 / 3, abs=1e-6)
