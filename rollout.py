"""Rollouts: prompts in, sampled and scored responses with their log-probabilities out.

The sampler is exact: at temperature 1 a token is drawn from the model's own softmax, with nothing
truncated, penalised or suppressed, whatever the model's generation_config says. Each response has a
stream of uniform numbers of its own, keyed on (seed, step, row), and a token is the inverse CDF at
the next of them: the result depends neither on how rows are batched nor on the number of ranks. A
prompt is read once and its key-value cache is handed to its G responses; finished rows leave the
batch. Log-probabilities and entropies are read off the same logits: nobody computes them again.
"""
import hashlib
import inspect
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from transformers import DynamicCache

import packing
from common import fail, rank, world


@dataclass
class Rollout:
    """One response of T tokens."""

    row: int  # its number in the global batch: prompt * G + sibling
    prompt: list  # token ids
    ids: list  # T token ids, with the stop token where it stopped by itself
    logprobs: torch.Tensor  # (T,) under the distribution that each token was drawn from
    entropy: torch.Tensor  # (T,) of that distribution, in nats
    finished: bool  # False: cut off at max_new
    text: str  # without the stop token


def keyed_generator(*key):
    """A CPU generator that is a function of its key, say (seed, "sample", step, row), and of nothing else."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def encode(tokenizer, messages, think=False):
    """Token ids of a chat up to the point where the assistant speaks. A tokenizer without a chat template gets plain
    text: each message as "Role: content" and a blank line, then "Assistant:"."""
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking=think, tokenize=True, return_dict=False)
    turns = [f"{m['role'].capitalize()}: {m['content']}\n\n" for m in messages]
    return tokenizer("".join(turns) + "Assistant:").input_ids


def stop_ids(model, tokenizer):
    """Ids that end a response: the tokenizer's EOS and all that the model's generation_config names."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = named if isinstance(named, list) else [named]
    ids = sorted({i for i in (*named, tokenizer.eos_token_id) if i is not None})
    if not ids:
        raise ValueError(f"{tokenizer.name_or_path}: no EOS token in tokenizer or generation_config: nothing stops it")
    return ids


def decode(tokenizer, ids, stop):
    """A response as text, without its stop token and other special tokens."""
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in stop else ids, skip_special_tokens=True)


def pick(logits, uniform, temperature, top_p):
    """Draw one token a row by the inverse CDF. logits (B, V), uniform (B,) in [0, 1).

    Returns token, logprob, entropy, each (B,), of softmax(logits / temperature), cut to the smallest set of tokens
    whose mass reaches top_p and renormalised (top_p = 1 leaves all). Temperature 0 takes the largest.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    if top_p < 1:
        sorted_logprobs, order = logprobs.sort(-1, descending=True)
        before = sorted_logprobs.exp().cumsum(-1) - sorted_logprobs.exp()  # mass of the tokens above this one
        cut = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logprobs = torch.log_softmax(logprobs.masked_fill(cut, float("-inf")), -1)
    probs = logprobs.exp()
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        cdf = probs.double().cumsum(-1)  # a float32 sum over 150,000 tokens would drop the small ones
        token = torch.searchsorted(cdf, uniform[:, None].to(cdf) * cdf[:, -1:], right=True)[:, 0]
        token = token.clamp(max=logits.shape[-1] - 1)
    entropy = -torch.where(probs > 0, probs * logprobs, 0).sum(-1)
    return token, logprobs.gather(-1, token[:, None])[:, 0], entropy


@torch.inference_mode()
def _sample_batch(model, prompts, uniforms, stop, temperature, top_p):
    """prompts: N lists of ids; uniforms (R, max_new) with R = N * G. Returns tokens, logprobs, entropy, each
    (R, max_new), and lengths (R,), all on the CPU."""
    device, (rows, max_new) = model.device, uniforms.shape
    group = rows // len(prompts)
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):  # padded on the left, so that the last column is everybody's last token
        ids[i, width - len(prompt):] = torch.tensor(prompt)
        mask[i, width - len(prompt):] = 1
    ids, mask, stop = ids.to(device), mask.to(device), torch.tensor(stop, device=device)
    position = (mask.cumsum(1) - 1).clamp(min=0)  # padding does not count: absolute positions need this
    cache = DynamicCache(config=model.config)
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # its older name

    def forward(ids, position):
        with packing.compute(model):
            return model(input_ids=ids, position_ids=position, attention_mask=mask, use_cache=True,
                         logits_to_keep=1, **{named: cache}).logits[:, -1]

    logits = forward(ids, position).repeat_interleave(group, 0)  # one read of the prompt for G responses
    cache.batch_repeat_interleave(group)
    mask, position = mask.repeat_interleave(group, 0), position[:, -1:].repeat_interleave(group, 0)
    alive = torch.arange(rows)
    tokens = torch.zeros(rows, max_new, dtype=torch.long)
    logprobs, entropy = (torch.zeros(rows, max_new, dtype=torch.promote_types(logits.dtype, torch.float32))
                         for _ in range(2))
    lengths = torch.full((rows,), max_new)
    for t in range(max_new):
        token, logprob, ent = pick(logits, uniforms[alive, t].to(device), temperature, top_p)
        tokens[alive, t], logprobs[alive, t], entropy[alive, t] = token.cpu(), logprob.cpu(), ent.cpu()
        going = ~torch.isin(token, stop)
        if t + 1 == max_new or not going.any():
            lengths[alive[~going.cpu()]] = t + 1
            break
        if not going.all():  # finished rows leave the batch
            lengths[alive[~going.cpu()]] = t + 1
            keep = going.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            alive, mask, position, token = alive[keep.cpu()], mask[keep], position[keep], token[keep]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        position = position + 1
        logits = forward(token[:, None], position)
    return tokens, logprobs, entropy, lengths


def sample(model, tokenizer, prompts, numbers, group, max_new, key, temperature=1.0, top_p=1.0, tokens_at_once=2**18):
    """Sample `group` responses to each prompt.

    prompts: lists of token ids; numbers: the prompts' places in the global batch (a rank holds some of them), from
    which rows are numbered; key: what the random numbers depend on beside the row, (seed, step). `tokens_at_once`
    bounds the key-value cache: rows x (prompt + max_new). Returns Rollouts in the order of the prompts, siblings
    adjacent.
    """
    stop = stop_ids(model, tokenizer)
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))  # like lengths together: little padding
    done = {}
    while order:
        room = max(1, tokens_at_once // (group * (len(prompts[order[0]]) + max_new)))
        batch, order = order[:room], order[room:]
        rows = [numbers[i] * group + g for i in batch for g in range(group)]
        uniforms = torch.stack([torch.rand(max_new, generator=keyed_generator("sample", *key, row), dtype=torch.float64)
                                for row in rows])
        tokens, logprobs, entropy, lengths = _sample_batch(
            model, [prompts[i] for i in batch], uniforms, stop, temperature, top_p)
        for k, row in enumerate(rows):
            n = int(lengths[k])
            if logprobs[k, :n].isnan().any():
                raise FloatingPointError(f"sampling {key}, row {row}: the model's logits are NaN")
            ids = tokens[k, :n].tolist()
            done[row] = Rollout(row, prompts[batch[k // group]], ids, logprobs[k, :n].clone(), entropy[k, :n].clone(),
                                ids[-1] in stop, decode(tokenizer, ids, stop))
    return [done[n * group + g] for n in numbers for g in range(group)]


# ---- the prompts of a run, and the rewards of its responses --------------------------------------

def load_rows(args, task, tokenizer):
    """Training rows whose prompt fits in --max_prompt. Each has gained "ids", its prompt's tokens, and
    "opened", the tag of the reasoning block that the prompt itself opens, or ""."""
    try:
        rows = task.load(args.data, "train", seed=args.seed)
    except ValueError as error:
        fail(f"--data {args.data}: {error}")
    kept = fitting(rows, task, tokenizer, args)
    if not kept:
        fail(f"--data {args.data}: none of its {len(rows)} prompts has --max_prompt "
             f"{args.max_prompt} tokens or fewer")
    return kept


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
        order = torch.randperm(len(rows), generator=keyed_generator("order", args.seed, epoch))
        out.append((number, rows[int(order[place])]))
    return out


def score(task, rollouts, batch, group):
    """(rewards (N,), what the verifier said of each), in order. Verifiers wait for worker processes
    and sandboxes, so they run in threads."""
    rows = [row for _, row in batch for _ in range(group)]
    texts = [row["opened"] + r.text for row, r in zip(rows, rollouts, strict=True)]
    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        scored = list(pool.map(task.score, texts, [row["answer"] for row in rows]))
    return torch.tensor([reward for reward, _ in scored]), [told for _, told in scored]


def measure(rollouts, rewards, task):
    """What a log line says of the responses, as values whose mean it takes."""
    texts = [r.text for r in rollouts]
    return dict(reward=rewards, entropy=torch.cat([r.entropy for r in rollouts]),
                length=[float(len(r.ids)) for r in rollouts],
                artifact=[artifact(r.ids) for r in rollouts],
                boxed=[float(text.count("\\boxed")) for text in texts],
                frac_truncated=[float(not r.finished) for r in rollouts],
                frac_think=[float(any(tag in text for tag in task.THINK_TAGS)) for text in texts])


def artifact(ids):
    """The largest share of a response that one repeated n-gram fills: n * count / T over n = 1..8,
    count being its occurrences without overlap, two or more; 0 where nothing repeats."""
    best = 0.0
    for n in range(1, min(8, len(ids) // 2) + 1):
        count, end = {}, {}
        for i in range(len(ids) - n + 1):
            gram = tuple(ids[i:i + n])
            if i >= end.get(gram, 0):
                count[gram], end[gram] = count.get(gram, 0) + 1, i + n
        most = max(count.values())
        best = max(best, n * most / len(ids) if most > 1 else 0.0)
    return best


def samples(tokenizer, rollouts, rewards, passes, most=2):
    """A few rows as text, for samples.jsonl. passes: the student's prompts and any teacher's."""
    names = ("prompt", "teacher_prompt")
    return [{"row": rollouts[i].row, "reward": rewards[i].item(), "response": rollouts[i].text,
             **{name: column[i] and tokenizer.decode(column[i])
                for name, column in zip(names, passes, strict=False)}}
            for i in range(min(most, len(rollouts)))]
