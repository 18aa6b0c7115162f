"""The losses of GRPO, SDPO and StableSDPO, as functions of tensors. Nothing here holds state.

GRPO  -min(rho A, clip(rho, 1-eps_low, 1+eps_high) A),  rho = exp(logp_theta - logp_old)
SDPO  D_beta(student || teacher) at each response token, the teacher under a richer prompt
then  loss = sum(weights * per-token loss) / denominator of the WHOLE global batch, divided once.

Legend: B rows, G responses, T tokens, K kept, V vocabulary.
All is computed in float32 at least (float64 stays float64). What a mask excludes is selected out
BEFORE an exp, not multiplied by 0 after: 0 * inf is nan, behind a torch.where in the gradient too.
Sources: GRPO arXiv:2402.03300, SDPO arXiv:2601.20802, generalised JSD arXiv:2306.13649,
k3 http://joschu.net/blog/kl-approx.html, the paper arXiv:2607.01763.
"""

import torch
from torch import Tensor


def _wide(*tensors: Tensor) -> torch.dtype:
    """float32, or float64 where one of the tensors is float64."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def _log_ratio(logprobs: Tensor, old: Tensor, mask: Tensor | None = None) -> Tensor:
    """logprobs - old where the mask says so, else 0. No gradient through old."""
    dtype = _wide(logprobs, old)
    logprobs, old = logprobs.to(dtype), old.detach().to(dtype)
    if mask is not None:
        logprobs, old = (torch.where(mask.bool(), x, torch.zeros_like(x)) for x in (logprobs, old))
    return logprobs - old


def log_softmax(logits: Tensor) -> Tensor:
    """log p of every token, nats: (..., V) -> (..., V). Log-probabilities it leaves as they are."""
    return logits.log_softmax(-1, dtype=_wide(logits))


def at_labels(values: Tensor, labels: Tensor) -> Tensor:
    """The value at each label: values (..., V), labels (...) long in [0, V) -> (...)."""
    return values.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def entropy(log_p: Tensor) -> Tensor:
    """- sum_v p log p of log-probabilities, nats, 0 log 0 = 0: (..., V) -> (...). No gradient."""
    log_p = log_p.detach()
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)  # 0 * inf is nan


def token_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """log p(label), nats: logits (..., V), labels (...) long in [0, V) -> (...).

    The logits at position t-1 predict token t: the caller shifts, and divides by a temperature.
    """
    return at_labels(log_softmax(logits), labels)


def logprobs_and_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(token_logprobs, entropy), (...) each, in nats. The entropy has no gradient."""
    log_p = log_softmax(logits)                                                  # (..., V)
    return at_labels(log_p, labels), entropy(log_p)


# ---- GRPO ----------------------------------------------------------------------------------------

def group_advantages(rewards: Tensor, group_size: int, std: bool = True,
                     eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean) / (std + eps) within each group of adjacent rows: (N,) -> (N,).

    Bessel's std; std=False leaves the division out. A group of equal rewards, or of one, has A = 0
    exactly: the rounding residue of a mean (0.35 seven times) divided by its own std is not small.
    Raises ValueError when N is no multiple of group_size. (arXiv:2402.03300, 4.1)
    """
    if group_size < 1 or rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(f"{tuple(rewards.shape)} rewards do not split into groups of {group_size}")
    r = rewards.detach().to(_wide(rewards)).view(-1, group_size)                 # (N/G, G)
    advantages = r - r.mean(1, keepdim=True)
    if std:
        variance = advantages.square().sum(1, keepdim=True) / max(group_size - 1, 1)
        advantages = advantages / (variance.sqrt() + eps)
    equal = (r == r[:, :1]).all(1, keepdim=True)
    return torch.where(equal, torch.zeros_like(advantages), advantages).view(-1)


def policy_gradient_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor,
                         mask: Tensor | None = None, eps_low: float = 0.2, eps_high: float = 0.28
                         ) -> Tensor:
    """-min(rho A, clip(rho, 1-eps_low, 1+eps_high) A) per token; 0, also in gradient, off the mask.

    logprobs, old_logprobs, mask (B, T), advantages (B,), one a row -> (B, T); or flat tokens: all
    of them (n,) -> (n,). At rho = 1 the values are -A, whose sum over a group is 0 where lengths
    are equal, while the gradient -A grad logp is not: a printed loss near 0 says nothing.
    Rows with A = 0 are excluded like padding (their rho may overflow, and 0 * inf is nan).
    """
    a = _per_token(advantages, logprobs)
    on = a != 0 if mask is None else mask.bool() & (a != 0)                      # (B, T)
    ratio = _log_ratio(logprobs, old_logprobs, on).exp()                         # 1 off it
    loss = -torch.min(ratio * a, ratio.clamp(1 - eps_low, 1 + eps_high) * a)
    return torch.where(on, loss, torch.zeros_like(loss))


@torch.no_grad()
def clipped_tokens(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor,
                   mask: Tensor | None = None, eps_low: float = 0.2, eps_high: float = 0.28
                   ) -> Tensor:
    """(B, T) bool: tokens whose gradient the clip cuts off; their share is `clip_frac`."""
    a, ratio = _per_token(advantages, logprobs), _log_ratio(logprobs, old_logprobs, mask).exp()
    cut = ((a > 0) & (ratio > 1 + eps_high)) | ((a < 0) & (ratio < 1 - eps_low))
    return cut if mask is None else mask.bool() & cut


def _per_token(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """A row's advantage beside each of its tokens: (B,) -> (B, 1). Flat tokens have their own."""
    a = advantages.detach()
    return a if a.shape == logprobs.shape else a.unsqueeze(1)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 = exp(d) - d - 1 >= 0 with d = logp_ref - logp_theta, per token, in nats: (...) -> (...).

    Its VALUE, on samples from theta, estimates KL(theta || ref) without bias. Its GRADIENT does
    not: differentiated as a loss it is (1 - exp(d)) grad logp_theta, in expectation the gradient of
    KL(ref || theta). (k1 = -d is worse: its gradient is the score, 0 in expectation.)
    """
    d = -_log_ratio(logprobs, ref_logprobs)
    return torch.expm1(d) - d                  # expm1 keeps the digits of d^2/2 where d is small


# ---- SDPO ----------------------------------------------------------------------------------------

def importance_weight(logprobs: Tensor, old_logprobs: Tensor, clip: float = 2.0) -> Tensor:
    """min(exp(logp - logp_old), clip) per token, detached: (...) -> (...). (`--is_clip`, `--tis`)

    A heuristic in SDPO: D at t depends on y_<t alone, and this weighs it by the ratio of y_t.
    """
    return _log_ratio(logprobs, old_logprobs).detach().exp().clamp(max=clip)


class _Divergence(torch.autograd.Function):
    """D_beta of two distributions given as normalised log-probabilities (..., V) -> (...).

    Autograd would keep about ten (..., V) tensors alive; the derivative is short enough to write:
    dD/dlog p_S = (1-beta) p_S log(p_S/M) (the parts through M cancel), so ONE tensor is kept.
    At the end points multiples of p_S are left out: the softmax before it absorbs them.
    """

    @staticmethod
    def forward(ctx, log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
        gap = log_t - log_s                                  # log(p_T/p_S)
        if beta == 0:                                        # KL(p_T || p_S)
            p = log_t.exp()
            value = torch.where(p > 0, gap.mul_(p), 0).sum(-1)           # 0 log 0 = 0
            grad = log_s.exp().sub_(p)                       # 0 when equal; see above for the p_S
        elif beta == 1:                                      # KL(p_S || p_T)
            p = log_s.exp()
            grad = torch.where(p > 0, gap.neg_().mul_(p), 0)
            value = grad.sum(-1)
        else:
            # log(M/p_S) = log(1-beta + beta p_T/p_S) = log1p(beta expm1(gap)): exactly 0 when equal
            # and with all its digits when nearly so. Beyond |gap| = 80 the smaller probability is
            # below exp(-80), and what the clamp changes is below rounding. -inf - -inf counts as 0.
            gap.nan_to_num_(nan=0.0).clamp_(-80.0, 80.0)
            grad = torch.expm1(gap).mul_(beta).log1p_().mul_(log_s.exp()).mul_(-(1 - beta))
            gap.neg_().expm1_().mul_(1 - beta).log1p_().mul_(log_t.exp())          # p_T log(M/p_T)
            value = grad.sum(-1) - beta * gap.sum(-1)
        ctx.save_for_backward(grad if ctx.needs_input_grad[0] else None)
        return value.clamp(min=0)                            # D >= 0; nan stays nan

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_value: Tensor):
        return ctx.saved_tensors[0] * grad_value.unsqueeze(-1), None, None


def _buckets(logits: Tensor, kept: Tensor, tail: bool) -> Tensor:
    """Log-probabilities of the kept tokens and of everything else: (..., V) -> (..., K + 1).

    The tail is logsumexp of the logits OUTSIDE the K minus the full normaliser. 1 minus the top-K
    sum would be rounding noise, or log of 0, and dead in gradient, just where the head is sure.
    """
    low = torch.finfo(logits.dtype).min                      # -inf - low = -inf, never nan
    top = logits.gather(-1, kept)                                                # (..., K)
    if not tail:
        return top - top.logsumexp(-1, keepdim=True).clamp(min=low)
    rest = logits.scatter(-1, kept, low).logsumexp(-1, keepdim=True)             # (..., 1)
    rest = torch.where(rest > low / 2, rest, -torch.inf)     # empty; all -inf would have grad nan
    return torch.cat([top, rest], -1) - logits.logsumexp(-1, keepdim=True).clamp(min=low)


def generalized_jsd(student_logits: Tensor, teacher_logits: Tensor, beta: float = 0.5,
                    topk: int = 0, tail: bool = True, normalized: bool = False) -> Tensor:
    """D_beta = (1-beta) KL(p_S || M) + beta KL(p_T || M),  M = (1-beta) p_S + beta p_T, in nats.

    student_logits, teacher_logits (..., V) -> (...). Gradient through p_S, also inside M; none
    through p_T. 0 <= D_beta, D_0.5 <= ln 2. A logit of -inf is a probability of 0; for
    0 < beta < 1 value and gradient are finite whatever the supports. (arXiv:2306.13649, eq. 1)

    beta 0 is KL(p_T || p_S) (forward), beta 1 KL(p_S || p_T) (reverse), by convention: the limits
    of D_beta/beta and D_beta/(1-beta). D_beta ITSELF tends to 0 at both ends, so the loss jumps
    there (p_T .9/.1, p_S .5/.5: beta .9 gives .043, beta 1 .511) and a beta near an end acts as a
    smaller learning rate. An end point is inf, as defined, where its first distribution has mass
    and its second has none; at beta 1 the gradient then is not finite either.

    topk=K takes the student's K largest tokens; the rest of both becomes one tail bucket (tail), or
    both are renormalised over the K. 0, or K >= V: full vocabulary, exact. normalized: the logits
    are log-probabilities (log_softmax), and their normaliser need not be computed again.
    """
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(f"logits {tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}")
    if not 0 <= beta <= 1 or topk < 0:
        raise ValueError(f"needs 0 <= beta <= 1 and topk >= 0, got beta={beta}, topk={topk}")
    dtype, teacher_logits = _wide(student_logits, teacher_logits), teacher_logits.detach()
    if 0 < topk < student_logits.shape[-1]:
        kept = student_logits.detach().topk(topk, -1).indices                    # (..., K)
        log_s = _buckets(student_logits.to(dtype), kept, tail)
        log_t = _buckets(teacher_logits.to(dtype), kept, tail)
    else:
        log_s, log_t = (x.to(dtype) if normalized else x.log_softmax(-1, dtype=dtype)
                        for x in (student_logits, teacher_logits))               # (..., V)
    return _Divergence.apply(log_s, log_t, beta)


# ---- from tokens to a scalar ---------------------------------------------------------------------

def token_mean(values: Tensor, mask: Tensor, total: Tensor | float | None = None) -> Tensor:
    """Sum of the masked values / total; total = tokens of the GLOBAL batch (default: of this mask).

    values, mask (...) -> scalar. A total of 0 gives 0 with a zero gradient, not 0/0.
    """
    mask = mask.bool()
    values = values.to(_wide(values))
    total = mask.sum() if total is None else total
    return torch.where(mask, values, torch.zeros_like(values)).sum() / (total + (total == 0))


def aggregate_weights(mask: Tensor, agg: str, dtype: torch.dtype = torch.float32
                      ) -> tuple[Tensor, float]:
    """Weights (B, T) and this batch's share of the denominator, for `--agg`.

    loss = sum(weights * per_token) / (sum of the shares over the global batch):
    "token", the mean over response tokens (weight 1, share = number of tokens), or
    "seq", the mean of the rows' own means (weight 1/T_i, share = rows with a token).
    """
    if agg not in ("token", "seq"):
        raise ValueError(f"agg {agg!r}: must be 'token' or 'seq'")
    weights = mask.bool().to(dtype)                                              # (B, T)
    lengths = weights.sum(1, keepdim=True)                                       # (B, 1)
    if agg == "token":
        return weights, float(lengths.sum())
    return weights / lengths.clamp(min=1), float((lengths > 0).sum())
