"""What scored samples say: of one model, of one against its base, of a sequence of stages.

    mean@n   mean reward of all samples; its standard error is over prompts, since the samples of
             one prompt are not independent
    pass@k   chance that one of k samples is right, unbiased: 1 - C(n-c, k) / C(n, k) for a prompt
             with c of n right (arXiv:2107.03374)
    maj@n    reward of the answer that most samples of a prompt give; tied answers share
"""
from collections import Counter
from math import comb

import torch

from data import BENCHMARKS


def summary(records):
    """The numbers of one benchmark, as fractions; the README's glossary explains them."""
    n, prompts = len(records[0]["rewards"]), len(records)
    means = torch.tensor([sum(r["rewards"]) / n for r in records], dtype=torch.float64)
    right = [sum(x == 1 for x in r["rewards"]) for r in records]

    def share(name, test):
        return sum(test(x) for r in records for x in r[name]) / (n * prompts)

    return {"mean": means.mean().item(), "prompts": prompts, "n": n,
            "se": (means.std() / prompts**0.5).item() if prompts > 1 else None,
            "pass": {str(k): sum(pass_at_k(n, c, k) for c in right) / prompts
                     for k in sorted({1, 2, 4, 8, 16, 32, 64, n}) if k <= n},
            "maj": sum(majority(r["answers"], r["rewards"]) for r in records) / prompts,
            "length": share("lengths", float),
            "unreadable": sum(r.get("gold", 1) != 1 for r in records),
            "frac_truncated": share("finished", lambda finished: not finished),
            "frac_answered": share("answers", lambda answer: answer is not None)}


def pass_at_k(n, c, k):
    """Chance that k of n samples, drawn without replacement, hold one of the c right ones."""
    return 1 - comb(n - c, k) / comb(n, k)


def majority(answers, rewards):
    """Mean reward of the most frequent answer, over all where several tie; 0 without any."""
    votes = Counter(answer for answer in answers if answer is not None)
    winners = {answer for answer in votes if votes[answer] == max(votes.values())}
    own = [reward for answer, reward in zip(answers, rewards, strict=True) if answer in winners]
    return sum(own) / len(own) if own else 0.0


def compare(score, base):
    """Change against a baseline: absolute, relative, and the latter's two halves, gain and
    forgetting. The relative ones are None where the base scores 0: unknown is not 0."""
    relative = (score - base) / base if base else None
    return {"difference": score - base, "relative": relative,
            "gain": None if relative is None else max(relative, 0.0),
            "forgetting": None if relative is None else max(-relative, 0.0)}


# ---- a sequence of stages -----------------------------------------------------------------------

def estimate(top, bottom=None):
    """Mean of a number a prompt, (P,), or the ratio of two such means, and its standard error (of a
    ratio by the delta method); None where there is no prompt."""
    value, unit, scale = top.mean(), 1.0, 1.0
    if bottom is not None:
        value, unit, scale = top.mean() / bottom.mean(), bottom, bottom.mean()
    se = ((top - value * unit) / scale).std().item() / len(top)**0.5 if len(top) > 1 else None
    return {"mean": value.item(), "se": se} if len(top) else None


def mean(values, errors):
    """Mean of independent numbers, and its error; None where there is none."""
    se = None if None in errors else sum(e * e for e in errors)**0.5 / max(1, len(errors))
    return {"mean": sum(values) / len(values), "se": se} if values else None


def sequence(scores, order):
    """From {benchmark: (K+1, P) mean rewards of its prompts after k stages} and the stages' tasks:
    each cell's change against the base, {benchmark: [K+1 dicts]}, and a summary, whose names
    continual.py explains. Errors are paired over prompts."""
    changes, domains, means = {}, [], []
    for name, s in scores.items():
        changes[name] = [compare(x.mean().item(), s[0].mean().item()) | {
            "difference_se": estimate(x - s[0])["se"],
            "relative_se": estimate(x - s[0], s[0])["se"] if s[0].any() else None} for x in s]
    for k, task in enumerate(order, 1):
        own = [s for name, s in scores.items() if BENCHMARKS[name].domain == task]
        s = torch.cat([torch.empty(len(order) + 1, 0), *own], 1)  # all prompts of its benchmarks
        learned, kept, best = s[k] - s[0], s[-1] - s[0], s[s.mean(1).argmax()]
        row = {"base": s[0], "current": s[k], "last": s[-1], "learned": learned, "kept": kept,
               "forgotten": s[k] - s[-1], "below_best": best - s[-1]}
        row = {name: estimate(x) for name, x in row.items()}
        gain = row["learned"] or {"se": None}
        clear = gain["se"] is not None and gain["mean"] > 2 * gain["se"]
        row["share_kept"] = estimate(kept, learned) if clear else None  # else a share of noise
        domains.append({"task": task, "stage": k, **row})
    for k in range(len(order) + 1):
        known = [c[k] for c in changes.values() if c[k]["relative"] is not None]
        means.append({side: mean([c[side] for c in known],
                                 [c["relative_se"] if c[side] else 0.0 for c in known])
                      for side in ("gain", "forgetting")}
                     | {"relative": mean([c["relative"] for c in known],
                                         [c["relative_se"] for c in known])})
    back = [d["forgotten"] for d in domains[:-1] if d["forgotten"]]
    back = mean([-x["mean"] for x in back], [x["se"] for x in back])
    return changes, {"domains": domains, "backward_transfer": back, "mean": means}
