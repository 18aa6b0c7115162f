"""Rollouts: prompts in, sampled and scored responses with their log-probabilities out.

The sampler is exact: at temperature 1 a token is drawn from the model's own softmax, with nothing
truncated, penalised or suppressed, whatever the model's generation_config says. Each response has a
stream of uniform numbers of its own, keyed on (seed, step, row), and a token is the inverse CDF at
the next of them: the result depends neither on how rows are batched nor on the number of ranks. A
prompt is read once, its G responses share its keys and values, and finished rows leave the batch.
Log-probabilities and entropies are read off the same logits: nobody computes them again.

With --rollout vllm another engine draws the tokens, from the same distribution up to rounding. The
trainer's own log-probabilities and the entropies then take a pass of their own (`rescore`).
"""
import functools
import inspect
import json
from dataclasses import dataclass

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

import losses
import packing
from common import fail
from ranks import all_sum, gathered, keyed_generator


@dataclass
class Rollout:
    """One response of T tokens."""

    row: int  # its number in the global batch: prompt * G + sibling
    prompt: list  # token ids
    ids: list  # T token ids, with the stop token where it stopped by itself
    logprobs: torch.Tensor  # (T,) under the distribution that each token was drawn from
    entropy: torch.Tensor  # (T,) of that distribution, in nats; vLLM leaves it to `rescore`
    finished: bool  # False: cut off at max_new
    text: str  # without the stop token
    old: torch.Tensor = None  # (T,) by the trainer itself, where the sampler is another engine

    def __post_init__(self):
        self.old = self.logprobs if self.old is None else self.old


# ---- text and tokens -----------------------------------------------------------------------------

def encode(tokenizer, messages, think=False):
    """Token ids of a chat, up to where the assistant speaks. A tokenizer without a chat template
    gets plain text: every message as "Role: content" and a blank line, then "Assistant:"."""
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True,
                                             enable_thinking=think, return_dict=False)
    turns = [f"{m['role'].capitalize()}: {m['content']}\n\n" for m in messages]
    return tokenizer("".join(turns) + "Assistant:").input_ids


def stop_ids(model, tokenizer):
    """Ids that end a response: the tokenizer's EOS, and all that generation_config names."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None}
    if not ids:
        fail(f"--model {tokenizer.name_or_path}: has no EOS token; nothing would end a response")
    return sorted(ids)


def decode(tokenizer, ids, stop):
    """A response as text. The stop token is left out; any other special token shows."""
    return tokenizer.decode(ids[:-1] if ids[-1] in stop else ids)


# ---- sampling ------------------------------------------------------------------------------------

def pick(logits, uniform, temperature=1.0, top_p=1.0):
    """Draw one token a row by the inverse CDF. logits (B, V), uniform (B,) in [0, 1).

    Returns token, log-probability and entropy, (B,) each, of softmax(logits / temperature), cut to
    the fewest tokens that hold a mass of top_p and renormalised. Temperature 0 takes the largest,
    and gives its log-probability at temperature 1.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
    if top_p < 1:
        ordered, order = logprobs.exp().sort(-1, descending=True)
        above = ordered.cumsum(-1) - ordered  # the mass of the tokens that come before this one
        cut = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, order, above >= top_p)
        logprobs = torch.log_softmax(logprobs.masked_fill(cut, -torch.inf), -1)
    probs = logprobs.exp()
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        cdf = probs.double().cumsum(-1)  # in float32 a sum over 150,000 would lose the small ones
        token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
        token = token.clamp(max=logits.shape[-1] - 1)  # NaN: beyond all; `sample` names the row
    return token, losses.at_labels(logprobs, token), losses.entropy(logprobs)


class Growing(DynamicLayer):
    """A layer's cache of the tokens that R rows have sampled, in a buffer (2, R, KV, capacity, d)
    that doubles when it is full. (DynamicLayer copies all it holds for every token.)"""

    def update(self, keys, values, *args, **kwargs):
        n, new = self.get_seq_length(), torch.stack([keys, values])  # (2, R, KV, 1, d)
        self.buffer = self.buffer if n else new[:, :, :, :0]
        if n == self.buffer.shape[3]:
            room = new.new_empty(*new.shape[:3], max(n, 32), new.shape[4])
            self.buffer, self.is_initialized = torch.cat([self.buffer, room], 3), True
        self.buffer[:, :, :, n:n + 1] = new
        self.keys, self.values = self.buffer[:, :, :, :n + 1]  # along the first dimension
        return self.keys, self.values

    def batch_select_indices(self, going):
        if n := self.get_seq_length():  # the rows that stay move up
            self.buffer[:, :len(going), :, :n] = self.buffer[:, going, :, :n]
            self.buffer = self.buffer[:, :len(going)]
            self.keys, self.values = self.buffer[:, :, :, :n]


class SharedPrompts:
    """Keys and values of S prompts, once for all of their G siblings.

    A new token attends to its prompt and to its row's own tokens. The queries of siblings meet the
    prompt together, (G, d) @ (d, P), so that it is read once and not G times; the softmax runs over
    both parts. Exact: the same sums, in another order. r = query heads of a key-value head (KV).
    """

    def __init__(self, layers, mask, group):
        self.layers = [(layer.keys, layer.values) for layer in layers]  # (S, KV, P, d)
        self.padding = (mask == 0)[:, None, None]  # (S, 1, 1, P)
        self.group, self.place = group, torch.arange(len(mask) * group, device=mask.device)

    def select(self, going):
        """Some rows stay, and the prompts that still have one."""
        place = self.place[going]
        live, prompt = (place // self.group).unique(return_inverse=True)
        self.place = prompt * self.group + place % self.group
        if len(live) < len(self.padding):
            self.layers = [(keys[live], values[live]) for keys, values in self.layers]
            self.padding = self.padding[live]

    def by_prompt(self, rows):
        """(R, KV, r, x) -> (S, KV, G * r, x), with 0 for siblings that have left."""
        grid = rows.new_zeros(len(self.padding) * self.group, *rows.shape[1:])
        grid[self.place] = rows
        return grid.unflatten(0, (-1, self.group)).transpose(1, 2).flatten(2, 3)

    def by_row(self, grid):
        """The way back."""
        return grid.unflatten(2, (self.group, -1)).transpose(1, 2).flatten(0, 1)[self.place]

    def attend(self, layer, query, key, value, scaling):
        """query (R, H, 1, d), key and value (R, KV, t, d) of the row's own tokens: (R, 1, H, d)."""
        keys, values = self.layers[layer]
        query = query.unflatten(1, (key.shape[1], -1)).squeeze(3) * scaling  # (R, KV, r, d)
        prompt = (self.by_prompt(query) @ keys.mT).masked_fill_(self.padding, -torch.inf)
        scores = torch.cat([self.by_row(prompt), query @ key.mT], -1)  # (R, KV, r, P + t)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        prompt, own = weights.to(value.dtype).split([keys.shape[2], key.shape[2]], -1)
        out = self.by_row(self.by_prompt(prompt) @ values) + own @ value
        return out.flatten(1, 2)[:, None]


def _attention(module, query, key, value, mask, scaling=None, shared=None, **kwargs):
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return shared.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register("shared_prompts", _attention)  # without a mask function: it needs none


@torch.inference_mode()
def _sample_batch(model, prompts, uniforms, stop, temperature, top_p):
    """prompts: lists of token ids; uniforms (R, max_new), R = len(prompts) * G. Returns tokens,
    logprobs and entropy, (R, max_new) each, and lengths (R,), on the CPU."""
    device, (rows, max_new) = model.device, uniforms.shape
    group, width = rows // len(prompts), max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):  # padded on the left: the last column is everyone's last
        ids[i, width - len(prompt):] = torch.tensor(prompt)
        mask[i, width - len(prompt):] = 1
    ids, mask, stop = ids.to(device), mask.to(device), torch.tensor(stop, device=device)
    position = (mask.cumsum(1) - 1).clamp(min=0)  # padding does not count, or GPT-2 goes wrong
    cache = DynamicCache(config=model.config)
    names = inspect.signature(model.forward).parameters
    keywords = {"cache" if "cache" in names else "past_key_values": cache}  # the older name
    usual, shared = model.config._attn_implementation, None

    def forward(ids, position):
        if shared:
            model.config._attn_implementation = "shared_prompts"
        seen = {"shared": shared} if shared else {"attention_mask": mask}
        try:
            with packing.compute(model):
                return model(input_ids=ids, position_ids=position, use_cache=True,
                             logits_to_keep=1, **seen, **keywords).logits[:, -1]
        finally:
            model.config._attn_implementation = usual

    logits = forward(ids, position).repeat_interleave(group, 0)  # a prompt is read once
    if model.can_pack and model._supports_attention_backend and all(
            type(layer) is DynamicLayer and layer.keys.shape == layer.values.shape
            for layer in cache.layers):
        shared = SharedPrompts(cache.layers, mask, group)
        cache.layers = [Growing() for _ in cache.layers]
    else:
        cache.batch_repeat_interleave(group)
    mask, position = (x.repeat_interleave(group, 0) for x in (mask, position[:, -1:]))
    wide = torch.promote_types(logits.dtype, torch.float32)
    tokens = torch.zeros(rows, max_new, dtype=torch.long)
    logprobs, entropy = (torch.zeros(rows, max_new, dtype=wide) for _ in range(2))
    lengths, alive = torch.zeros(rows, dtype=torch.long), torch.arange(rows)
    for t in range(max_new):
        token, *values = pick(logits, uniforms[alive, t].to(device), temperature, top_p)
        for out, value in zip((tokens, logprobs, entropy), (token, *values), strict=True):
            out[alive, t] = value.cpu()
        lengths[alive] = t + 1
        going = (~torch.isin(token, stop)).nonzero()[:, 0]
        if t + 1 == max_new or len(going) == 0:
            break
        if len(going) < len(alive):  # finished rows leave the batch
            cache.batch_select_indices(going)
            if shared:
                shared.select(going)
            alive, mask, position = alive[going.cpu()], mask[going], position[going]
            token = token[going]
        mask, position = torch.cat([mask, mask.new_ones(len(mask), 1)], 1), position + 1
        logits = forward(token[:, None], position)
    return tokens, logprobs, entropy, lengths


def sample(model, tokenizer, prompts, numbers, group, max_new, key, temperature=1.0, top_p=1.0,
           tokens_at_once=2**19, bar=None):
    """Sample `group` responses to each prompt: Rollouts in the prompts' order, siblings adjacent.

    prompts: lists of token ids; numbers: their places in the global batch, of which a rank has
    some; key: what the random numbers depend on beside the row, say (seed, step). tokens_at_once
    bounds the key-value cache, prompts x (prompt + G x max_new). bar: over the responses.
    """
    stop, done = stop_ids(model, tokenizer), {}
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))  # so that few are padded
    while order:
        room = max(1, tokens_at_once // (len(prompts[order[0]]) + group * max_new))
        chosen, order = order[:room], order[room:]
        rows = [numbers[i] * group + g for i in chosen for g in range(group)]
        uniforms = torch.stack([torch.rand(max_new, dtype=torch.float64, generator=keyed_generator(
            "sample", *key, row)) for row in rows])
        tokens, logprobs, entropy, lengths = _sample_batch(
            model, [prompts[i] for i in chosen], uniforms, stop, temperature, top_p)
        for k, (row, n) in enumerate(zip(rows, lengths.tolist(), strict=True)):
            ids = tokens[k, :n].tolist()
            if logprobs[k, :n].isnan().any():
                raise FloatingPointError(f"{key}, row {row}: the student's logits are NaN")
            done[row] = Rollout(
                row, prompts[chosen[k // group]], ids, logprobs[k, :n].clone(),
                entropy[k, :n].clone(), ids[-1] in stop, decode(tokenizer, ids, stop))
        if bar is not None:
            bar.update(len(rows))
    return [done[number * group + g] for number in numbers for g in range(group)]


@torch.no_grad()
def logprobs(model, rollouts, tokens_per_micro, pack=True):
    """What a model gives the sampled tokens: (log-probabilities, entropies), (T,) for each row."""
    prompts, responses = [r.prompt for r in rollouts], [r.ids for r in rollouts]
    out, size = [None] * len(rollouts), packing.chunk_size(model)
    for rows in packing.micro_batches(
            model, range(len(rollouts)), [prompts], responses, tokens_per_micro, pack):
        hidden = packing.response_hidden(model, rows, prompts, responses, pack)
        label = torch.tensor([t for i in rows for t in responses[i]], device=hidden.device).long()
        parts = [losses.logprobs_and_entropy(packing.head(model, h), y)
                 for h, y in zip(hidden.split(size), label.split(size), strict=True)]
        if rows:
            lengths = [len(responses[i]) for i in rows]
            columns = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
            for i, *pair in zip(rows, *(x.split(lengths) for x in columns), strict=True):
                out[i] = pair
    return tuple(zip(*out, strict=True))


# ---- sampling by the engine that --rollout names -------------------------------------------------

def sampler(args, model, tokenizer):
    """`sample` by that engine, of the model as it is when called: a function of prompts, numbers,
    group, max_new, key, temperature, top_p, bar. Every rank calls it, with prompts or without."""
    if args.rollout == "vllm":
        auto = "bfloat16" if model.device.type == "cuda" else args.param_dtype
        dtype = auto if args.dtype == "auto" else args.dtype
        config = json.loads(model.config.to_json_string()) | {"dtype": dtype}  # not the weights'
        import vllm_engine  # which imports this module
        llm = vllm_engine.start(
                json.dumps(config), dtype, args.max_prompt + args.max_new, args.vllm_memory,
                args.tp, model.device.type)
        return functools.partial(vllm_engine.sample, llm, model, tokenizer, args.tp)

    def sample_hf(*given, **named):
        with gathered(model):
            return sample(model, tokenizer, *given, **named)
    return sample_hf


def rescore(model, rollouts, tokens_per_micro, pack=True):
    """Add the trainer's log-probabilities, `old`, and entropies to vLLM's rollouts. Returns a k3
    estimate of KL(sampler || trainer) at each token (n,). Rounding, in bfloat16 too, stays far
    below 0.1 nats: beyond, the sampler is another model, or NaN, and that raises RuntimeError."""
    trained = logprobs(model, rollouts, tokens_per_micro, pack)
    for r, old, entropy in zip(rollouts, *trained, strict=True):
        r.old, r.entropy = old, entropy
    gap = torch.cat([losses.kl_k3(r.logprobs, r.old) for r in rollouts])
    total, tokens = all_sum([gap.sum(), gap.numel()])  # on all ranks, so that all of them stop
    if not total / tokens <= 0.1:
        raise RuntimeError(f"vLLM samples from another model than the one that learns: KL "
                           f"{total / tokens:.2g} nats a token; have all weights reached it?")
    return gap
