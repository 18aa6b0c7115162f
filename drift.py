"""Drift: how far a checkpoint is from its base, in weights, in responses, and in distribution.

  weights    spectral shift, rotation, which entries moved: spectra.py
  responses  cosine similarity of the embeddings of the two models' answers to the same prompts
  sequences  KL(P || P_0) of a response, nats, on the checkpoint's own samples at T = 1
  excess     KL(P || P_0) - kl(a || p_0): how much further it moved than its success needed. Of all
             distributions with success a, the nearest to P_0 is at kl(a || p_0), two Bernoullis
  data sets  MMD^2 between the embeddings of their prompts

    python drift.py --tiny --model runs/x runs/y                 # against the committed tiny base
    python drift.py --base Qwen/Qwen3-4B --model A/ckpt-000050 B/ckpt-000050      # weights alone
    python drift.py --base DIR --model DIR --prompts math,math500,gpqa --n 0      # and MMD

Both models answer with the same random numbers: from itself a model is at exactly 0.
arXiv:2607.01763, A.8-A.14; (I) marks our reading.
"""
import functools
import importlib.util
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import common
import data
import eval as evaluation
import loading
import logbook
import losses
import packing
import ranks
import rollout
import spectra
from data import batches

TINY = dict(base="tiny", prompts="tiny", max_new=64, max_prompt=160, n=16, limit=32, rollout="hf")


# ---- responses and prompts -----------------------------------------------------------------------

@torch.no_grad()
def embed(model, sequences, tokens_per_micro=16384):
    """Mean last hidden state over the tokens of each list of ids: (N, D) float64, on the CPU."""
    first, rest = [ids[:1] for ids in sequences], [[*ids[1:], 0] for ids in sequences]
    out = [None] * len(sequences)  # packing gives the states that predict `rest`: those of all ids
    for rows in packing.micro_batches(
            model, range(len(out)), [first], rest, tokens_per_micro, pack=False):
        hidden = packing.response_hidden(model, rows, first, rest, pack=False)
        for i, states in zip(rows, hidden.split([len(rest[i]) for i in rows]), strict=True):
            out[i] = states.double().mean(0).cpu()
    return torch.stack(out)


@torch.no_grad()
def sequence_kl(model, base, rollouts, tokens_per_micro=16384):
    """(KL, log-ratio), nats, (N,) float64 each, of responses that `model` sampled at T = 1:
    sum_t KL(model(.|h_t) || base(.|h_t)) over the vocabulary, and sum_t log model(y_t)/base(y_t).
    Both have the mean KL(P || P_0), P over responses of up to max_new tokens; the first has the
    lower variance and the second checks it. Logits live for one chunk of tokens."""
    prompts, responses = [r.prompt for r in rollouts], [r.ids for r in rollouts]
    out = torch.zeros(2, len(rollouts), dtype=torch.float64)
    for rows in packing.micro_batches(
            model, range(len(rollouts)), [prompts], responses, tokens_per_micro):
        hidden = [packing.response_hidden(m, rows, prompts, responses) for m in (model, base)]
        row, label = torch.tensor([(i, t) for i in rows for t in responses[i]]).T
        for at in torch.arange(len(row)).split(packing.chunk_size(model)):
            logits = [packing.head(m, h[at]).double()  # (c, V)
                      for m, h in zip((model, base), hidden, strict=True)]
            own, other = (losses.token_logprobs(x, label[at].to(x.device)) for x in logits)
            kl = losses.generalized_jsd(*logits, beta=1)
            out.index_add_(1, row[at], torch.stack([kl, own - other]).cpu())
    return tuple(out)


def mmd2(x, y, width, unbiased=False):
    """MMD^2 of x, y (n, D) under exp(-d^2 / (2 width^2)). Biased, it is about 0.8/n for two samples
    of one distribution; unbiased, it is 0 on average and may be negative."""
    def mean(a, b):
        d = torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")
        k, n = (-d.square() / (2 * width**2)).exp(), len(d)
        return (k.sum() - k.trace()) / (n * (n - 1)) if unbiased and a is b else k.mean()
    return (mean(x, x) + mean(y, y) - 2 * mean(x, y)).item()


def mmd_table(sets, unbiased=False):
    """{name: (n_i, D)} -> MMD^2 of every two, under one bandwidth: the median distance over the
    pool of ALL sets. Each is cut to the n of the smallest, since the bias depends on n."""
    n = min(map(len, sets.values()))
    sets = {name: x[:n].double() for name, x in sets.items()}
    width = float(np.median(torch.pdist(torch.cat(list(sets.values())))))
    return {"n": n, "width": width, "unbiased": unbiased,
            "mmd2": {a: {b: mmd2(x, y, width, unbiased) for b, y in sets.items()}
                     for a, x in sets.items()}}


# ---- drift that success does not explain ---------------------------------------------------------

def bernoulli_kl(a, p):
    """kl(a || p) of two Bernoullis, nats; 0 log 0 = 0, and inf where p is 0 or 1 and a is not."""
    log = torch.special.xlogy
    return (log(a, a) - log(a, p)) + (log(1 - a, 1 - a) - log(1 - a, 1 - p))


def excess(kl, right, right0):
    """Excess drift KL(P || P_0) - kl(a || p_0) of each prompt, never clipped: a dict of (prompts,).
    kl (prompts, n): of the checkpoint's samples; right: which of THOSE succeed; right0: which of
    the base's. Rates are add-half, (c + 1/2) / (n + 1); the jackknife leaves out sample i of both
    and takes the bias of order 1/n off kl(a || p_0) (I)."""
    n, kl, x, y = kl.shape[1], kl.double().mean(1), right.double(), right0.double()

    def plug(c, c0, n):
        return bernoulli_kl((c + 0.5) / (n + 1), (c0 + 0.5) / (n + 1))

    c, c0 = x.sum(1, keepdim=True), y.sum(1, keepdim=True)
    half = plug(c, c0, n)[:, 0]
    jackknife = n * half - (n - 1) * plug(c - x, c0 - y, n - 1).mean(1)
    return {"sequence_kl": kl, "success": x.mean(1), "success_base": y.mean(1), "success_kl": half,
            "excess_add_half": kl - half, "excess_jackknife": kl - jackknife}


# ---- the script ----------------------------------------------------------------------------------

def get_args(argv=None):
    parser, whole = common.Parser(description=__doc__), common.at_least(0)
    add = parser.add_argument_group("what").add_argument
    add("--base", default="Qwen/Qwen3-4B", help="hub id, folder of safetensors, or tiny")
    add("--model", nargs="+", required=True, help="checkpoints that came from it, or run folders")
    add("--prompts", default="", help="benchmarks, and tasks for their training sets, "
        "with commas between; name=SOURCE takes its rows from a .jsonl file; or tiny")
    add("--tiny", action="store_true", help="laptop scale: base, prompts, lengths, samples")
    add("--out", default="drift.json", help="the summary; all records go to the .jsonl beside it")
    add = parser.add_argument_group("how").add_argument
    add("--rank", type=whole, default=0, help="leading directions (0: min(64, d/4))")
    add("--mask_frac", type=float, default=0.05, help="share of the entries in a principal mask")
    add("--n", type=whole, default=64, help="samples to a prompt (0: only MMD of the prompts)")
    add("--limit", type=whole, default=64, help="prompts of a set, drawn at random (0: all)")
    add("--unbiased", action="store_true", help="MMD^2 without its diagonal terms")
    add("--embedder", help="a sentence-transformers model (default: the base's hidden states)")
    common.add_length_args(add)
    add("--seed", type=int, default=0, help="of the samples and of what --limit draws")
    common.add_engine_args(add)
    parser.set_defaults(dtype="float32", param_dtype="float32", tp=1)  # of vLLM too: KL is small
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY)
    args = parser.parse_args(argv)
    if ranks.world() > 1:
        parser.error("runs in one process; start it without torchrun")
    if not 0 < args.mask_frac < 1:
        parser.error(f"--mask_frac {args.mask_frac}: must lie between 0 and 1")
    common.require_files(parser, args, "base", "model")
    if args.embedder and not importlib.util.find_spec("sentence_transformers"):
        parser.error("--embedder: needs the package sentence-transformers, which is not installed")
    known = [*data.BENCHMARKS, *(name for name, task in data.TASKS.items() if task.TRAIN)]
    tiny, given = [x for x in known if x.startswith("tiny_")], args.prompts.split(",")
    args.prompts = tiny if given == ["tiny"] else [x for x in given if x]
    for name, _, source in (entry.partition("=") for entry in args.prompts):
        if name not in known and not (source and name in data.TASKS):
            parser.error(f"--prompts {name}: must be of {', '.join(known)}")
        if source.endswith(".jsonl") and not Path(source).is_file():
            parser.error(f"--prompts {name}={source}: there is no such file")
    return args


def read(name, own, tokenizer, args):
    """(task, rows): args.limit of the prompts of a benchmark, or of a task's training set."""
    task, source, split = data.BENCHMARKS[name][:3] if name in data.BENCHMARKS else (
        name, data.TASKS[name].TRAIN, "train")
    rows = evaluation.read(data.TASKS[task], own or source, split, tokenizer, args, limit=0)
    order = torch.randperm(len(rows), generator=ranks.keyed_generator("rows", args.seed, name))
    rows = [rows[i] for i in order[:args.limit or None].tolist()]
    return data.TASKS[task], rows or common.fail(f"--prompts {name}: none fits in --max_prompt")


def make_embedder(args, base, tokenizer):
    """A function of lists of ids -> (N, D)."""
    if not args.embedder:
        return functools.partial(embed, base)
    from sentence_transformers import SentenceTransformer
    encode = SentenceTransformer(args.embedder).encode

    def embedder(sequences):
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in sequences]
        return torch.as_tensor(encode(texts)).double()
    return embedder


def response_drift(args, models, base, tokenizer, asked, embedder):
    """What the models answer to the prompts `asked`, {name: (task, rows)}, beside what the base
    does: ({model: {name: {measure: spread over prompts}}}, a record for each model and prompt)."""
    before, means, records = {}, {}, []
    for model_name in [args.base, *models]:
        model = loading.load_model(model_name)[0].to(base.device) if before else base
        sampler = rollout.sampler(args, model, tokenizer)
        for name, (task, rows) in asked.items():
            shape = len(rows), args.n
            rollouts = sampler([row["ids"] for row in rows], range(len(rows)), args.n,
                               args.max_new, ("drift", args.seed, name))
            right = batches.score(task, rollouts, list(enumerate(rows)), args.n)[0].view(shape) == 1
            x = embedder([r.ids for r in rollouts]).view(*shape, -1)
            if name not in before:  # the base, which answers first
                before[name] = right, x
                continue
            right0, y = before[name]
            kl, ratio = (v.view(shape) for v in sequence_kl(model, base, rollouts))
            cut = 1 - torch.tensor([r.finished for r in rollouts]).view(shape).double()
            columns = {**excess(kl, right, right0), "log_ratio": ratio.mean(1),
                       "similarity": torch.where((x == y).all(-1), 1.0,
                                                 F.cosine_similarity(x, y, -1)),
                       # of two of the base's own answers
                       "similarity_base": F.cosine_similarity(y, y.roll(1, 1), -1),
                       "frac_truncated": cut.mean(1)}
            means.setdefault(model_name, {})[name] = {
                key: spectra.spread(v.view(len(rows), -1).mean(1).tolist())
                for key, v in columns.items()}
            records += [{"model": model_name, "prompts": name, "id": row["id"],
                         **{key: v[i].tolist() for key, v in columns.items()}}
                        for i, row in enumerate(rows)]
    return means, records


def main(args):
    """Measure, print a table, write args.out and its records. Returns what args.out holds."""
    device, models, out = ranks.setup(args), list(dict.fromkeys(args.model)), Path(args.out)
    records = spectra.parameter_drift(args.base, models, args.rank, args.mask_frac, device=device)
    result = {**logbook.describe(args), "weights": spectra.summary(records),
              "gram_error": spectra.gram_error(records, args.base, device),
              "responses": {name: {} for name in models}}
    if args.prompts:
        base, tokenizer = loading.load_model(args.base)
        embedder = make_embedder(args, base.to(device), tokenizer)
        asked = {name: read(name, own, tokenizer, args)
                 for name, _, own in (entry.partition("=") for entry in args.prompts)}
        if len(asked) > 1:
            result["mmd"] = mmd_table({name: embedder([row["ids"] for row in rows])
                                       for name, (_, rows) in asked.items()}, args.unbiased)
        if args.n:
            means, more = response_drift(args, models, base, tokenizer, asked, embedder)
            result["responses"] |= means
            records += more
    out.parent.mkdir(parents=True, exist_ok=True)
    logbook.write_whole(out.with_suffix(".jsonl"), "".join(f"{json.dumps(r)}\n" for r in records))
    logbook.write_json(out, result)
    for name, answered in result["responses"].items():
        for part, row in {"weights": result["weights"][name]["all"], **answered}.items():
            print(name, part, *(f"{key} {s['mean']:.3g}" for key, s in row.items() if s), sep="  ")
    return result


if __name__ == "__main__":
    common.run(main, get_args)
