"""How far the weights of a model moved: spectra, subspaces, and which entries changed.

Of each 2-D weight of the blocks, one at a time, from safetensors files: the model is never loaded.
A matrix of 9728, 4096, 1024 x 2560 takes 8, 5, 0.4 s of CPU time on one thread, so the 36 x (3, 2,
2) of them in Qwen3-4B 20 core-minutes a model; records hold `seconds`. arXiv:2607.01763, A.8-A.12;
(I) marks our reading. drift.py prints and writes what is measured here.
"""
import math
import re
import time
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

import common
import loading

EXACT = 768  # a smaller side from which singular vectors come from the Gram matrix


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
