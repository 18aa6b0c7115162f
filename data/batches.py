"""The rows of a run: which prompts fit, which of them a step takes, and what their answers earn."""
import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from common import fail
from data import hub
from ranks import rank, world
from rollout import encode, keyed_generator


def load_rows(args, task, tokenizer):
    """Training rows whose prompt fits in --max_prompt. Each has gained "ids", its prompt's tokens,
    and "opened", the tag of the reasoning block that the prompt itself opens, or ""."""
    rows = read(task, args.data, "train", args, where=f"--data {args.data}")
    kept = fitting(rows, task, tokenizer, args)
    if not kept:
        fail(f"--data {args.data}: none of its {len(rows)} prompts has --max_prompt "
             f"{args.max_prompt} tokens or fewer")
    wrong = [told for reward, told in gold_scores(task, kept[:8]) if reward != 1]
    if len(wrong) == len(kept[:8]):
        fail(f"--data {args.data}: --task {args.task} gives its own gold answers 0 ({wrong[0]}): "
             "are these rows of another task?")
    return kept


def read(task, source, split, args, where, limit=None, hint=""):
    """task.load, with its refusals as exit code 2; --skip_bad leaves rows that cannot be read out
    and counts them on stderr."""
    with hub.skipping(args.skip_bad) as bad:
        try:
            rows = task.load(source, split, limit=limit, seed=args.seed)
        except ValueError as error:
            fail(f"{where}: {error}{hint}")
    if bad and rank() == 0:
        print(f"--skip_bad: left {len(bad)} of {len(rows) + len(bad)} rows of {source} out; the "
              f"first: {bad[0]}", file=sys.stderr)
    return rows


def gold_scores(task, rows):
    """(reward, feedback) of the rows' gold answers, written as perfect responses where that can be
    done: what the verifier does not accept there, no student will ever be rewarded for."""
    scored = []
    for row in rows:
        try:
            scored.append(task.score(task.render(row["answer"]), row["answer"]))
        except ValueError:  # asserts alone tell no program
            scored.append((1.0, ""))
    return scored


def fitting(rows, task, tokenizer, args):
    """The rows whose prompt fits; the others are counted on stderr."""
    kept = []
    for row in rows:
        ids = encode(tokenizer, row["messages"], args.think)
        if len(ids) <= args.max_prompt:
            opening = task.THINK_TAGS[0]
            opened = opening if tokenizer.decode(ids[-32:]).rstrip().endswith(opening) else ""
            kept.append({**row, "ids": ids, "opened": opened})
    if len(kept) < len(rows) and rank() == 0:
        print(f"dropped {len(rows) - len(kept)} of {len(rows)} prompts: longer than --max_prompt "
              f"{args.max_prompt} tokens", file=sys.stderr)
    return kept


def batch(rows, step, args):
    """This rank's prompts of a step: [(number in the global batch, row)].

    Every row comes once an epoch, in an order keyed on (seed, epoch): a resumed run needs no cursor
    but its step. Rank r takes the numbers r, r + ranks, ..., so that each of the --updates parts of
    a batch has equally many prompts on every rank.
    """
    out = []
    for number in range(rank(), args.prompts, world()):
        epoch, place = divmod((step - 1) * args.prompts + number, len(rows))
        out.append((number, rows[epoch_order(len(rows), args.seed, epoch)[place]]))
    return out


@functools.lru_cache(2)  # the last epochs': a batch may span two
def epoch_order(n, seed, epoch):
    return torch.randperm(n, generator=keyed_generator("order", seed, epoch)).tolist()


def score(task, rollouts, batch, group):
    """(rewards (N,), what the verifier said of each), in order. Verifiers wait for worker processes
    and sandboxes, so they run in threads; of siblings that wrote the same, one is looked at."""
    rows = [(k, row["opened"]) for k, (_, row) in enumerate(batch) for _ in range(group)]
    texts = [(k, opened + r.text) for (k, opened), r in zip(rows, rollouts, strict=True)]
    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        told = {(k, text): pool.submit(task.score, text, batch[k][1]["answer"])
                for k, text in dict.fromkeys(texts)}
        scored = [told[text].result() for text in texts]
    return torch.tensor([reward for reward, _ in scored]), [told for _, told in scored]
