"""Drift: how far a checkpoint is from its base, in weights, in responses, and in distribution.

  weights    2-D weights of the blocks, one at a time: spectral shift, rotation, which entries moved
  responses  cosine similarity of the embeddings of the two models' answers to the same prompts
  sequences  KL(P || P_0) of a response, nats, on the checkpoint's own samples at T = 1
  excess     KL(P || P_0) - kl(a || p_0): how much further it moved than its success needed. Of all
             distributions with success a, the nearest to P_0 is at kl(a || p_0), two Bernoullis
  data sets  MMD^2 between the embeddings of their prompts

    python drift.py --tiny --model runs/x runs/y                 # against the committed tiny base
    python drift.py --base Qwen/Qwen3-4B --model A/ckpt-000050 B/ckpt-000050      # weights alone
    python drift.py --base DIR --model DIR --prompts math,math500,gpqa --n 0      # and MMD

Both models answer with the same random numbers: from itself a model is at exactly 0. A matrix of
9728, 4096, 1024 x 2560 takes 8, 5, 0.4 s of CPU time on one thread, so the 36 x (3, 2, 2) of them
in Qwen3-4B 20 core-minutes a model; records hold `seconds`. arXiv:2607.01763, A.8-A.14; (I) marks
our reading.
"""
import functools
import importlib.util
import json
import math
import re
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

import common
import data
import eval as evaluation
import loading
import logbook
import losses
import packing
import ranks
import rollout
from data import batches

TINY = dict(base="tiny", prompts="tiny", max_new=64, max_prompt=160, n=16, limit=32, rollout="hf")
EXACT = 768  # a smaller side from which singular vectors come from the Gram matrix


# ---- weights -------------------------------------------------------------------------------------

def read_weights(name):
    """{"layers.0.self_attn.q_proj": function that reads it}: the 2-D weights of a model's blocks.
    name: "tiny", a hub id, or a folder of safetensors, one or shards (a run's stands for its last
    checkpoint). A tied weight is in the file once. GPT-2 keeps its matrices as (in, out)."""
    loading.refuse_damage(name)
    path = loading.folder(name)
    try:
        if not path.is_dir():
            from huggingface_hub import snapshot_download
            path = Path(snapshot_download(str(name), allow_patterns="model*.safetensors"))
        files = [safe_open(file, "pt") for file in sorted(path.glob("model*.safetensors"))]
    except (OSError, ValueError, SafetensorError) as error:
        common.fail(f"--model {name}: {str(error).strip().splitlines()[0]}")
    found = {m[1]: lambda f=file, k=key: f.get_tensor(k)
             for file in files for key in file.keys()  # noqa: SIM118
             if (m := re.fullmatch(r"(?:model\.|transformer\.)?(.*?\b\d+\..+)\.weight", key))
             and len(file.get_slice(key).get_shape()) == 2}
    return found or common.fail(f"--model {name}: no safetensors file with 2-D weights of blocks")


def matrix_type(name):
    """"layers.0.self_attn.q_proj" -> "q"; a name of another style is its own type, "mlp.c_fc"."""
    known = re.search(r"\b(q|k|v|o|gate|up|down)_proj$", name)
    return known[1] if known else re.sub(r"^.*?\b\d+\.", "", name)


def principal(w, rank, mask_frac=0.05, exact=EXACT):
    """w (m, n) float64 -> all its singular values, falling; the top `rank` left singular vectors
    (m, r); the principal mask (m, n), bool: the mask_frac largest entries, by magnitude and with
    ties, of the rank-r approximation (A.12). With a smaller side of `exact` or more it all comes
    from the smaller Gram matrix: five times faster, blind below 1e-8 of s_1."""
    if min(w.shape) < exact:
        u, s, vt = torch.linalg.svd(w, full_matrices=False)
        u, low = u[:, :rank], (u[:, :rank] * s[:rank]) @ vt[:rank]
    else:
        tall = w.shape[0] > w.shape[1]
        squares, v = torch.linalg.eigh(w.T @ w if tall else w @ w.T)  # rising
        s, v = squares.flip(0).clamp(min=0).sqrt(), v[:, -rank:].flip(1)
        u, low = (torch.linalg.qr(w @ v).Q, w @ v @ v.T) if tall else (v, v @ (v.T @ w))
    low, kept = low.abs(), max(1, round(mask_frac * w.numel()))
    return s, u, low >= low.flatten().kthvalue(w.numel() + 1 - kept).values


def rotation(u0, uk):
    """Largest principal angle between the spans of u0, uk (m, r), degrees. A cosine is flat at 0
    degrees and a sine at 90, so each is used where it keeps its digits. (A.11)"""
    inside = u0.T @ uk
    sine = torch.linalg.matrix_norm(uk - u0 @ inside, 2).item()
    if sine < math.sqrt(0.5):
        return math.degrees(math.asin(sine))
    return math.degrees(math.acos(min(torch.linalg.svdvals(inside)[-1].item(), 1.0)))


def iou(a, b):
    """Intersection over union of two bool masks, percent; 0 where both are empty."""
    return 100 * (a & b).sum().item() / max(1, (a | b).sum().item())


def compare(before, after):
    """From one result of `principal` to another: ||s_k - s_0|| / ||s_0|| (A.8), rotation, overlap.
    Of one matrix by both routes, this is the error of the Gram route."""
    (s0, u0, mask0), (s, u, mask) = before, after
    return {"nss": ((s - s0).norm() / s0.norm()).item(), "pm_overlap": iou(mask0, mask),
            "rotation": 0.0 if torch.equal(u0, u) else rotation(u0, u)}  # not 1e-15


def matrix_drift(w0, others, rank=0, mask_frac=0.05, exact=EXACT):
    """Drift from w0 (m, n) to the same matrix of each checkpoint: a list of dicts. rank 0 is
    min(64, d/4), d the smaller side (I). gap is s_r / s_{r+1} of the base: near 1 the leading
    subspace, and so its rotation, means little. What is not finite is None. `seconds` of the first
    have the base's in them."""
    began, w0, side, out = time.perf_counter(), w0.double(), min(w0.shape), []
    rank = min(rank or max(1, min(64, side // 4)), side)
    s0, _, mask = base = principal(w0, rank, mask_frac, exact)
    gap = (s0[rank - 1] / s0[rank]).item() if rank < side else math.inf
    for wk in (w.double() for w in others):
        after = base if torch.equal(w0, wk) else principal(wk, rank, mask_frac, exact)
        changed = w0.bfloat16() != wk.bfloat16()
        m, c = (x.double().mean().item() for x in (mask, changed))
        values = {**compare(base, after), "pm_update": iou(mask, changed), "density": c,
                  "pm_update_chance": 100 * m * c / (m + c - m * c), "gap": gap,
                  "relative_change": ((wk - w0).norm() / w0.norm()).item()}
        values["seconds"], began = time.perf_counter() - began, time.perf_counter()
        out.append({**{k: v if math.isfinite(v) else None for k, v in values.items()},
                    "shape": list(w0.shape), "rank": rank, "gram": side >= exact})
    return out


def parameter_drift(base, models, rank=0, mask_frac=0.05, exact=EXACT, device="cpu"):
    """matrix_drift of each matrix and model (named as in read_weights), with "model", "matrix" and
    "type". Exits with 2 where two models do not match."""
    names, records = [base, *models], []
    weights = [read_weights(name) for name in names]
    for name, other in zip(names, weights, strict=True):
        for key in sorted(weights[0].keys() ^ other.keys()):
            common.fail(f"--model {name}: {key} is in one of it and {base} alone")
    for key in weights[0]:
        w0, *others = read = [other[key]().to(device) for other in weights]
        for name, w in zip(names, read, strict=True):
            if w.shape != w0.shape or not w.isfinite().all():
                common.fail(f"--model {name}: {key} is {tuple(w.shape)} where {base} has "
                            f"{tuple(w0.shape)}, or not all of it is finite")
        drifts = matrix_drift(w0, others, rank, mask_frac, exact)
        records += [{"model": name, "matrix": key, "type": matrix_type(key), **drift}
                    for name, drift in zip(models, drifts, strict=True)]
    return records


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


def spread(values, draws=2000):
    """Of one value a matrix or a prompt, None left out: mean, 10th and 90th percentile; and of that
    mean, over matrices or prompts drawn anew, the standard error and the 95% interval."""
    x = torch.tensor([v for v in values if v is not None], dtype=torch.float64)
    if not len(x):
        return None
    pick = torch.randint(len(x), (draws, len(x)), generator=torch.Generator().manual_seed(0))
    means = x[pick].mean(1)
    ends = [v.quantile(q).item() for v, q in ((x, 0.1), (x, 0.9), (means, 0.025), (means, 0.975))]
    return {"n": len(x), "mean": x.mean().item(), "se": means.std().item(),
            **dict(zip(("p10", "p90", "low", "high"), ends, strict=True))}


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


def summary(records):
    """Of the records of parameter_drift: {model: {type of matrix, or "all": {measure: spread}}}."""
    out, other = {}, ("model", "matrix", "type", "shape", "rank", "gram")
    for name, kind in dict.fromkeys((r["model"], t) for r in records for t in ("all", r["type"])):
        own = [r for r in records if r["model"] == name and kind in ("all", r["type"])]
        out.setdefault(name, {})[kind] = {
            key: spread([r[key] for r in own]) for key in own[0] if key not in other}
    return out


def gram_error(records, base, device):
    """How far the Gram route is off, on the smallest matrix that took it; None if none did."""
    taken = [(math.prod(r["shape"]), r["matrix"], r["rank"]) for r in records if r["gram"]]
    if not taken:
        return None
    _, key, rank = min(taken)  # the smallest: there the exact route is affordable
    w = read_weights(base)[key]().to(device).double()
    return compare(*(principal(w, rank, exact=exact) for exact in (math.inf, 0)))


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
                key: spread(v.view(len(rows), -1).mean(1).tolist()) for key, v in columns.items()}
            records += [{"model": model_name, "prompts": name, "id": row["id"],
                         **{key: v[i].tolist() for key, v in columns.items()}}
                        for i, row in enumerate(rows)]
    return means, records


def main(args):
    """Measure, print a table, write args.out and its records. Returns what args.out holds."""
    device, models, out = ranks.setup(args), list(dict.fromkeys(args.model)), Path(args.out)
    records = parameter_drift(args.base, models, args.rank, args.mask_frac, device=device)
    result = {**logbook.describe(args), "weights": summary(records),
              "gram_error": gram_error(records, args.base, device),
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
