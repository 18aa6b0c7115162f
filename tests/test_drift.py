"""Every metric of drift against an oracle written another way: known rotations and spectra, masks
by hand, loops, full enumeration, simulation with a known truth."""
import itertools
import json
import math
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import worker
from safetensors.torch import load_file, save_file

import data
import drift
import loading
import packing
import rollout
import spectra

ROWS = Path(__file__).parent / "rows" / "cases.jsonl"
CASES = {case["id"]: case for case in map(json.loads, ROWS.open())}


def orthogonal(n, k, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, k, dtype=torch.float64, generator=g)).Q


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- weights: one matrix -------------------------------------------------------------------------

ANGLES = [0.0, 1e-6, 1e-3, 1.0, 44.999, 45.001, 80.0, 89.999, 90 - 1e-6]


def turned(degrees, m=40, r=5):
    """Bases (m, r) of two subspaces with principal angles degrees * (1, 1/2, .. 1/r), mixed."""
    q = orthogonal(m, 2 * r + 2, 1)
    angle = torch.tensor([math.radians(degrees) / i for i in range(1, r + 1)], dtype=torch.float64)
    # sin and cos of an angle near 90 degrees through its complement, which has the digits
    rest = torch.tensor([math.radians(90 - degrees)], dtype=torch.float64)
    cos, sin = torch.cat([rest.sin(), angle[1:].cos()]), torch.cat([rest.cos(), angle[1:].sin()])
    if degrees < 45:
        cos, sin = angle.cos(), angle.sin()
    return q[:, :r], (q[:, :r] * cos + q[:, r:2 * r] * sin) @ orthogonal(r, r, 2)


@pytest.mark.parametrize("degrees", ANGLES)
def test_rotation_of_known_bases(degrees):
    u0, uk = turned(degrees)
    for a, b in ((u0, uk), (uk, u0)):
        found = spectra.rotation(a, b)
        near = min(degrees, 90 - degrees) if degrees else 1.0
        assert abs(found - degrees) < max(1e-6 * near, 5e-14)  # digits of the small side


@pytest.mark.parametrize("exact", [1000, 0])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("degrees", [1e-6, 30.0, 75.0])
def test_matrices_of_known_rotation_and_spectrum(degrees, wide, exact):
    """W = U S V' with a tail below rank r: rotation, nss and gap are known in closed form."""
    r, m, n = 5, 40, 64 if wide else 24
    u0, uk = turned(degrees)
    rest = orthogonal(m, 2 * r + 2, 1)[:, -2:]  # outside both spans
    v = orthogonal(n, 7, 3)
    s = torch.tensor([9.0, 7, 5, 4, 3, 1, 0.5], dtype=torch.float64)
    sk = torch.tensor([9.5, 7, 5.2, 4, 3.1, 0.8, 0.5], dtype=torch.float64)
    mix = orthogonal(r, r, 2)  # uk is mixed by it: undo it, so that the singular vectors are turned
    w0 = torch.cat([u0, rest], 1) * s @ v.T
    wk = torch.cat([uk @ mix.T, rest], 1) * sk @ v.T
    (found,) = spectra.matrix_drift(w0, [wk], rank=r, exact=exact)
    assert found["rotation"] == pytest.approx(degrees, rel=1e-5)
    by_hand = math.sqrt(0.5**2 + 0.2**2 + 0.1**2 + 0.2**2) / math.sqrt(81 + 49 + 25 + 16 + 9 + 1.25)
    assert found["nss"] == pytest.approx(by_hand, rel=1e-6 if exact else 1e-5)
    assert found["gap"] == pytest.approx(3.0, rel=1e-9)
    assert found["gram"] is (exact == 0) and found["rank"] == r and found["shape"] == [m, n]


@pytest.mark.parametrize("exact", [10, 0])
def test_masks_by_hand(exact):
    low = torch.tensor([[2.0, -8, 5, 0], [1, -4, 2.5, 0]])  # rank 1: (2, 1) x (1, -4, 2.5, 0)
    w0 = low + 0.5 * torch.outer(torch.tensor([1.0, -2]), torch.tensor([0.0, 0, 0, 1]))
    wk = w0 + torch.tensor([[0.0, -0.1, 0, 0.25], [0.001, 0, 0, 0]])  # 1.001 is 1 in bf16
    for share, least in ((0.05, 8.0), (1 / 8, 8.0), (2 / 8, 5.0), (3 / 8, 4.0), (4 / 8, 2.5)):
        for turn in (lambda x: x, lambda x: x.T):
            mask = spectra.principal(turn(w0).double(), 1, share, exact)[2]
            assert torch.equal(mask, turn(low.abs() >= least))
    (found,) = spectra.matrix_drift(w0, [wk], rank=1, mask_frac=1 / 8, exact=exact)
    assert found["density"] == 2 / 8
    assert found["pm_update"] == 50.0  # M is one entry, C is that one and another
    assert found["pm_update_chance"] == pytest.approx(100 / 11)
    assert found["pm_overlap"] == 100.0
    size = w0.square().sum().sqrt().item()
    assert found["relative_change"] == pytest.approx(math.sqrt(0.0725 + 1e-6) / size, rel=1e-5)


def test_overlap_is_of_the_two_rank_r_masks():
    """numpy's SVD and a sort, on matrices so far apart that the masks differ a lot."""
    g = generator(4)
    w0 = torch.randn(30, 50, generator=g)
    wk = w0 + 0.3 * torch.randn(30, 50, generator=g)
    (found,) = spectra.matrix_drift(w0, [wk])

    def largest(w):
        u, s, vt = np.linalg.svd(w.double().numpy())
        size = np.abs(u[:, :7] @ np.diag(s[:7]) @ vt[:7]).ravel()  # 7 = 30 // 4
        return set(np.argsort(-size)[:75].tolist())  # 75 = 5% of 1500
    m0, mk = largest(w0), largest(wk)
    changed = {i for i in range(1500) if (w0.flatten()[i].bfloat16() - wk.flatten()[i].bfloat16())}
    assert found["rank"] == 7
    assert found["pm_overlap"] == pytest.approx(100 * len(m0 & mk) / len(m0 | mk))
    assert 20 < found["pm_overlap"] < 90
    assert found["pm_update"] == pytest.approx(100 * len(m0 & changed) / len(m0 | changed))


@pytest.mark.parametrize("shape", [(96, 160), (160, 96)])
@pytest.mark.parametrize("decay, bound", [(0.0, 1e-12), (6.0, 1e-10), (20.0, 1e-7)])
def test_error_of_the_gram_route(shape, decay, bound):
    """Flat spectrum, one down to 1e-6, one down to 1e-20, where the Gram matrix sees nothing."""
    k = min(shape)
    s = 10 ** -torch.linspace(0, decay, k, dtype=torch.float64)
    s[:24] += 0.5  # so that the leading subspace is one
    w = orthogonal(shape[0], k, 5) * s @ orthogonal(shape[1], k, 6).T
    exact, gram = (spectra.principal(w, 24, exact=x) for x in (math.inf, 0))
    assert exact[0] == pytest.approx(s.sort(descending=True).values, abs=1e-12)
    error = spectra.compare(exact, gram)
    assert error["nss"] < bound and error["rotation"] < 1e-9 and error["pm_overlap"] == 100
    assert error["rotation"] > 0  # two computations: it would be 0 if one route served for both


def test_default_rank_and_what_is_undefined():
    square = torch.randn(300, 400, generator=generator())
    assert spectra.matrix_drift(square, [square])[0]["rank"] == 64
    assert spectra.matrix_drift(square[:3], [square[:3]])[0]["rank"] == 1
    (found,) = spectra.matrix_drift(square[:5], [square[:5] + 1], rank=9)
    assert found["rank"] == 5 and found["gap"] is None  # there is no s_6
    (found,) = spectra.matrix_drift(torch.zeros(4, 6), [square[:4, :6]])
    assert found["nss"] is None and found["relative_change"] is None


# ---- weights: whole models -----------------------------------------------------------------------

@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """worker's models, and of some a neighbour: every weight moved by 2% of its spread."""
    root = tmp_path_factory.mktemp("models")
    folders = worker.make_folders(root)
    for kind in ("llama", "gpt2"):
        model, tokenizer = loading.load_model(folders[kind])
        with torch.no_grad():
            for p in model.parameters():
                p += 0.02 * p.std(correction=0) * torch.randn(p.shape, generator=generator(1))
        for name, size in (("moved", "1GB"), ("sharded", "20KB")):
            model.save_pretrained(root / f"{kind} {name}", max_shard_size=size)
            tokenizer.save_pretrained(root / f"{kind} {name}")
            folders[f"{kind} {name}"] = str(root / f"{kind} {name}")
    save_file({"layers.0.wq.weight": torch.zeros(2, 2)},  # as some hub folders have beside theirs
              root / "llama sharded" / "consolidated.safetensors")
    return folders


def test_matrices_of_a_model(folders):
    """Those of the blocks, each once, whatever is tied; shards change nothing; types; numbers."""
    names = {f"layers.{i}.{part}_proj" for i in range(2) for part in
             ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up",
              "mlp.down")}
    assert len(list(Path(folders["llama sharded"]).glob("model-*.safetensors"))) > 3
    for kind in ("llama", "untied", "qwen3", "llama sharded"):
        assert set(spectra.read_weights(folders[kind])) == names
    models = [folders["llama moved"], folders["llama sharded"], folders["llama"]]
    records = spectra.parameter_drift(folders["llama"], models)
    assert len(records) == 3 * len(names)
    state = [load_file(Path(folders[k]) / "model.safetensors") for k in ("llama", "llama moved")]
    by_model = {m: {r["matrix"]: r for r in records if r["model"] == m} for m in models}
    for name in names:
        one, shard, same = (by_model[m][name] for m in models)
        assert one["type"] in ("q", "k", "v", "o", "gate", "up", "down")
        assert f".{one['type']}_proj" in name
        timeless = [{k: v for k, v in r.items() if k not in ("model", "seconds")}
                    for r in (one, shard)]
        assert timeless[0] == timeless[1] and one["seconds"] > 0
        w0, wk = (x[f"model.{name}.weight"].double().numpy() for x in state)
        s0, sk = (np.linalg.svd(w, compute_uv=False) for w in (w0, wk))
        assert one["nss"] == pytest.approx(np.linalg.norm(sk - s0) / np.linalg.norm(s0), rel=1e-9)
        u0, uk = (np.linalg.svd(w)[0][:, :one["rank"]] for w in (w0, wk))
        cosine = np.linalg.svd(u0.T @ uk, compute_uv=False).min()
        assert one["rotation"] == pytest.approx(math.degrees(math.acos(cosine)), rel=1e-6)
        assert [same[k] for k in ("nss", "rotation", "pm_overlap", "pm_update", "density")] == [
            0, 0, 100, 0, 0]


def test_gpt2_names(folders):
    records = spectra.parameter_drift(folders["gpt2"], [folders["gpt2 sharded"]])
    assert sorted(r["type"] for r in records) == sorted(
        2 * ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"])
    assert {r["matrix"] for r in records} >= {"h.0.attn.c_attn", "h.1.mlp.c_proj"}
    assert spectra.matrix_type("layers.3.mlp.experts.17.down_proj") == "down"
    assert spectra.matrix_type("layers.3.mlp.gate") == "mlp.gate"  # a router is no gate_proj


def test_what_does_not_match(folders, tmp_path, capsys):
    def copy(change, name):
        shutil.copytree(folders["llama"], tmp_path / name)
        state = load_file(tmp_path / name / "model.safetensors")
        change(state)
        save_file(state, tmp_path / name / "model.safetensors")
        return str(tmp_path / name)

    key = "model.layers.1.mlp.up_proj.weight"
    bad = {
        "layers.1.mlp.up_proj is in one": copy(lambda s: s.pop(key), "lacks"),
        "layers.1.mlp.up_proj is (48, 31)": copy(lambda s: s.update({key: s[key][:, 1:].clone()}),
                                                 "other"),
        "not all of it is finite": copy(lambda s: s[key].view(-1)[7:8].fill_(math.nan), "nan"),
        "no safetensors": str(tmp_path),
        "absent": str(tmp_path / "absent"),
        "h.0.attn.c_attn is in one": folders["gpt2"],
    }
    Path(tmp_path / "cut").mkdir()
    Path(tmp_path / "cut" / "model.safetensors").write_bytes(
        Path(folders["llama"], "model.safetensors").read_bytes()[:5000])
    bad["cut"] = str(tmp_path / "cut")
    for part, name in bad.items():
        with pytest.raises(SystemExit) as stop:
            spectra.parameter_drift(folders["llama"], [name])
        told = capsys.readouterr().err
        assert stop.value.code == 2 and told.count("\n") == 1 and name in told and part in told


def test_bad_flags(capsys):
    for flags, part in ((["--prompts", "tiny_maths"], "--prompts tiny_maths"),
                        (["--prompts", "tiny_math=no.jsonl"], "--prompts tiny_math=no.jsonl"),
                        (["--prompts", "logic"], "--prompts logic"),  # has no training set
                        (["--mask_frac", "1.5"], "--mask_frac 1.5"), (["--rank", "-1"], "--rank"),
                        (["--embedder", "x"], "sentence-transformers")):
        with pytest.raises(SystemExit) as stop:
            drift.get_args(["--model", "m", *flags])
        told = capsys.readouterr().err
        assert stop.value.code == 2 and told.count("\n") == 1 and part in told


# ---- sequences -----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def toy():
    """Two float64 models over 10 tokens; all 820 responses of up to 3 tokens, where 0 stops; and
    the probabilities of them all, from one plain forward pass over those of a length."""
    models = [worker.make_model("gpt2", 10, seed).double() for seed in (0, 1)]
    prompt, responses = [3, 1, 4], [
        [*head, last] for n in (1, 2, 3) for head in itertools.product(range(1, 10), repeat=n - 1)
        for last in (range(10) if n == 3 else [0])]
    probs = []
    for model in models:
        packing.probe(model)
        parts = []
        for n in (1, 2, 3):  # the order of `responses`
            ids = torch.tensor([r for r in responses if len(r) == n])
            with torch.no_grad():
                given = torch.cat([torch.tensor([prompt]).expand(len(ids), 3), ids], 1)
                logprobs = model(given).logits.log_softmax(-1)[:, 2:-1]
            parts.append(logprobs.gather(-1, ids[..., None]).sum((1, 2)).exp())
        probs.append(torch.cat(parts))
    return models, [SimpleNamespace(prompt=prompt, ids=ids) for ids in responses], probs


def test_sequence_kl_by_enumeration(toy, monkeypatch):
    """Both columns average to KL(P || P_0), and no more logits are alive than a chunk has."""
    (model, base), rollouts, (p, p0) = toy
    assert p.sum().item() == pytest.approx(1, abs=1e-12) and len(rollouts) == 820
    truth = (p * (p / p0).log()).sum().item()
    seen, head = [], packing.head
    monkeypatch.setattr(packing, "CHUNK", 70)
    monkeypatch.setattr(packing, "head", lambda m, h: seen.append(len(h)) or head(m, h))
    kl, ratio = drift.sequence_kl(model, base, rollouts, tokens_per_micro=500)
    assert max(seen) == 7
    assert (p * kl).sum().item() == pytest.approx(truth, abs=1e-10)
    assert ratio == pytest.approx((p / p0).log(), abs=1e-10)
    assert kl.dtype == torch.float64 and truth > 0.1
    variance = [(p * (x - truth) ** 2).sum().item() for x in (kl, ratio)]
    assert variance[0] < 0.5 * variance[1]
    again = drift.sequence_kl(base, base, rollouts)
    assert not again[0].any() and not again[1].any()


def test_pythagoras(toy):
    """KL(P || P_0) = KL(P || Q) + kl(a || p_0), Q the reweighted base, whatever succeeds; and no
    other distribution with success a is nearer to P_0 than Q."""
    (model, base), rollouts, (p, p0) = toy
    kl = (p * drift.sequence_kl(model, base, rollouts)[0]).sum()
    for seed in range(20):
        share = 0.03 + 0.045 * seed
        success = torch.rand(len(p), generator=generator(seed)) < share
        a, a0 = p[success].sum(), p0[success].sum()
        q = torch.where(success, p0 * a / a0, p0 * (1 - a) / (1 - a0))
        apart = (p * (p / q).log()).sum()
        assert kl.item() == pytest.approx((apart + drift.bernoulli_kl(a, a0)).item(), abs=1e-10)
        assert (q * (q / p0).log()).sum().item() == pytest.approx(
            drift.bernoulli_kl(a, a0).item(), abs=1e-10)


def test_bernoulli_kl():
    def kl(a, p):
        return drift.bernoulli_kl(*torch.tensor([a, p], dtype=torch.float64)).item()
    assert kl(0.7, 0.2) == pytest.approx(0.7 * math.log(3.5) + 0.3 * math.log(0.375), abs=1e-15)
    assert kl(0.0, 0.25) == pytest.approx(math.log(4 / 3)) and kl(1.0, 0.25) == math.log(4)
    assert kl(0.0, 0.0) == kl(1.0, 1.0) == kl(0.3, 0.3) == 0
    assert kl(0.5, 0.0) == kl(0.5, 1.0) == kl(1.0, 0.0) == math.inf


# ---- excess drift --------------------------------------------------------------------------------

def test_excess_by_hand():
    """One prompt at a time, leaving out one pair of samples at a time."""
    kl = torch.tensor([[1.0, 3, 2, 2], [0.0, 0, 0, 0]])
    right, right0 = [[1, 1, 1, 0], [1, 0, 0, 1]], [[0, 1, 0, 0], [0, 0, 0, 1]]
    found = drift.excess(kl, torch.tensor(right).bool(), torch.tensor(right0).bool())

    def half(x, y):
        a, p = ((sum(v) + 0.5) / (len(v) + 1) for v in (x, y))
        return a * math.log(a / p) + (1 - a) * math.log((1 - a) / (1 - p))
    for i, (x, y) in enumerate(zip(right, right0, strict=True)):
        left = [half(x[:j] + x[j + 1:], y[:j] + y[j + 1:]) for j in range(4)]
        jackknife = 4 * half(x, y) - 3 * sum(left) / 4
        drifted = [2.0, 0.0][i]
        assert found["excess_add_half"][i].item() == pytest.approx(drifted - half(x, y))
        assert found["excess_jackknife"][i].item() == pytest.approx(drifted - jackknife)
        assert found["success_kl"][i].item() == pytest.approx(half(x, y))
    assert found["excess_add_half"][1] < 0  # not clipped
    assert found["success"].tolist() == [0.75, 0.5] and found["success_base"].tolist() == [0.25] * 2


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("a, p0", [(0.7, 0.3), (0.5, 0.4), (0.9, 0.6)])
def test_bias_of_the_excess_estimate(a, p0, paired):
    """20,000 prompts of one truth, n = 64: the jackknife hits it, add-half misses by its own 1/n
    term; also where the two models share their random numbers, as they do here."""
    n, prompts = 64, 20000
    u, v = torch.rand(2, prompts, n, generator=generator(1), dtype=torch.float64)
    kl = 2 * torch.rand(prompts, n, generator=generator(2), dtype=torch.float64)  # mean 1
    found = drift.excess(kl, u < a, (u if paired else v) < p0)
    truth = 1 - (a * math.log(a / p0) + (1 - a) * math.log((1 - a) / (1 - p0)))
    # second order: f_aa var(a) / 2 + f_pp var(p) / 2 + f_ap cov, and the pull of add-half to 1/2
    f_a, f_p = math.log(a * (1 - p0) / (p0 * (1 - a))), (1 - a) / (1 - p0) - a / p0
    f_pp, f_ap = a / p0**2 + (1 - a) / (1 - p0) ** 2, -1 / (p0 * (1 - p0))
    bias = (0.5 + f_pp * p0 * (1 - p0) / 2 + f_ap * paired * (min(a, p0) - a * p0)
            + f_a * (0.5 - a) + f_p * (0.5 - p0)) / n
    error = found["excess_jackknife"].std().item() / math.sqrt(prompts)
    assert abs(found["excess_jackknife"].mean().item() - truth) < 3 * error + 5e-4
    assert abs(found["excess_add_half"].mean().item() - truth + bias) < 3 * error + 1.5e-3
    assert error < 2e-3


def test_spread():
    values = (torch.randn(400, generator=generator()) * 3 + 1).double().tolist()
    found = spectra.spread([*values, None])
    assert found["n"] == 400 and found["mean"] == pytest.approx(statistics.fmean(values))
    assert [found["p10"], found["p90"]] == pytest.approx(np.quantile(values, [0.1, 0.9]).tolist())
    error = statistics.pstdev(values) / 20
    assert found["se"] == pytest.approx(error, rel=0.06)
    for end, sign in (("low", -1), ("high", 1)):
        assert found[end] - found["mean"] == pytest.approx(sign * 1.96 * error, rel=0.12)
    assert spectra.spread([None]) is None and spectra.spread([2.0])["se"] == 0


# ---- embeddings and data sets --------------------------------------------------------------------

def test_embeddings(folders):
    """Against one plain forward pass for each; neither order nor neighbours matter."""
    model, _ = loading.load_model(folders["llama"])
    g = generator(3)
    sequences = [torch.randint(5, 60, (n,), generator=g).tolist() for n in (4, 1, 9, 30, 2)]
    with torch.no_grad():
        plain = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].mean(0)
                 for ids in sequences]
    for budget in (1, 12, 1000):
        found = drift.embed(model, sequences, budget)
        assert found.dtype == torch.float64
        assert found.float() == pytest.approx(torch.stack(plain), abs=1e-5)


def kernel_mean(xs, ys, width, skip=False):
    values = [math.exp(-math.dist(x, y) ** 2 / (2 * width**2))
              for i, x in enumerate(xs) for j, y in enumerate(ys) if not (skip and i == j)]
    return sum(values) / len(values)


@pytest.mark.parametrize("unbiased", [False, True])
def test_mmd_by_loops(unbiased):
    """One bandwidth over the pool of all three sets, each cut to 7 rows."""
    g = generator(5)
    sets = {"a": torch.randn(7, 3, generator=g), "b": torch.randn(9, 3, generator=g) + 1,
            "c": 4 * torch.randn(8, 3, generator=g)}
    found = drift.mmd_table(sets, unbiased)
    lists = {name: x[:7].tolist() for name, x in sets.items()}
    pool = [x for rows in lists.values() for x in rows]
    width = statistics.median(math.dist(x, y) for x, y in itertools.combinations(pool, 2))
    assert found["n"] == 7 and found["width"] == pytest.approx(width, rel=1e-6)
    for a, b in itertools.permutations(lists, 2):
        x, y = lists[a], lists[b]
        value = (kernel_mean(x, x, width, unbiased) + kernel_mean(y, y, width, unbiased)
                 - 2 * kernel_mean(x, y, width))
        assert found["mmd2"][a][b] == pytest.approx(value, abs=1e-7)
    assert [found["mmd2"][a][a] for a in lists] == pytest.approx([0] * 3, abs=1e-15)


def test_floor_of_mmd():
    """Of two samples of one distribution: about 0.8/n biased, about 0 unbiased."""
    n, found = 40, {False: [], True: []}
    for seed in range(30):
        x, y = torch.randn(2, n, 64, generator=generator(seed))
        for unbiased, values in found.items():
            values.append(drift.mmd_table({"x": x, "y": y}, unbiased)["mmd2"]["x"]["y"])
    assert 0.7 / n < statistics.fmean(found[False]) < 0.9 / n
    assert abs(statistics.fmean(found[True])) < 0.03 / n


# ---- the script ----------------------------------------------------------------------------------

def run(folders, tmp_path, base, *models, names="tiny_math,tiny_logic"):
    out = tmp_path / "new" / "drift.json"
    result = drift.main(drift.get_args([
        "--base", folders[base], "--model", *(folders[m] for m in models), "--prompts", names,
        "--n", "6", "--limit", "4", "--max_new", "12", "--out", str(out)]))
    records = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert json.loads(out.read_text()) == result
    return result, records


def test_identical_models(folders, tmp_path):
    """E10: a model that is another folder, in shards, of the same weights has not drifted."""
    zero = CASES["E10"]["expected"]["identical_model_drift"]
    result, records = run(folders, tmp_path, "llama moved", "llama sharded")
    (name,) = result["weights"]
    for row in result["weights"][name].values():
        for key in ("nss", "rotation", "pm_update", "density", "relative_change"):
            assert row[key]["mean"] == row[key]["p90"] == zero
        assert row["pm_overlap"]["mean"] == 100
    answered = [r for r in records if "prompts" in r]
    assert len(answered) == 8
    for r in answered:
        for key in ("sequence_kl", "log_ratio", "success_kl", "excess_add_half",
                    "excess_jackknife"):
            assert r[key] == zero
        assert r["similarity"] == [1.0] * 6 and min(r["similarity_base"]) < 0.9
        assert r["success"] == r["success_base"]


def test_what_the_script_writes(folders, tmp_path, monkeypatch):
    """Every number of the summary from the records; those of a prompt from the sampler and the
    trainer's own log-probabilities."""
    monkeypatch.setattr(spectra.parameter_drift, "__defaults__", (0, 0.05, 32, "cpu"))  # k, v exact
    monkeypatch.setattr(data.TASKS["math"], "score",  # an untrained model has no right answer
                        lambda text, answer: (float(len(text) % 2), ""))
    result, records = run(folders, tmp_path, "llama", "llama moved", "llama")
    name = folders["llama moved"]
    matrices = [r for r in records if r.get("matrix") and r["model"] == name]
    for kind, row in result["weights"][name].items():
        values = [r for r in matrices if kind in ("all", r["type"])]
        assert len(values) == (14 if kind == "all" else 2)
        for key, numbers in row.items():
            x = [r[key] for r in values]
            assert numbers["mean"] == pytest.approx(statistics.fmean(x))
            assert numbers["p10"] == pytest.approx(np.quantile(x, 0.1))
            assert numbers["p90"] == pytest.approx(np.quantile(x, 0.9))
    assert {r["gram"] for r in matrices} == {True, False}
    assert 0 < result["gram_error"]["nss"] < 1e-12 and result["gram_error"]["pm_overlap"] == 100

    (model, tokenizer), (base, _) = (loading.load_model(folders[k])
                                     for k in ("llama moved", "llama"))
    rows = {row["id"]: row for row in data.TASKS["math"].load("tiny", "test")}
    mine = [r for r in records if r.get("prompts") == "tiny_math" and r["model"] == name]
    assert len(mine) == 4 and [r["id"] for r in mine] != list(rows)[:4]  # drawn, not the first
    prompts = [rollout.encode(tokenizer, rows[r["id"]]["messages"]) for r in mine]
    drawn = rollout.sample(model, tokenizer, prompts, range(4), 6, 12, ("drift", 0, "tiny_math"))
    before = rollout.sample(base, tokenizer, prompts, range(4), 6, 12, ("drift", 0, "tiny_math"))
    scored = [rollout.logprobs(m, drawn, 1000) for m in (model, base)]
    for i, record in enumerate(mine):
        own = range(6 * i, 6 * i + 6)
        ratio = [(scored[0][0][j] - scored[1][0][j]).sum().item() for j in own]
        assert record["log_ratio"] == pytest.approx(statistics.fmean(ratio), abs=1e-4)
        assert record["success"] == statistics.fmean(len(drawn[j].text) % 2 for j in own)
        assert record["success_base"] == statistics.fmean(len(before[j].text) % 2 for j in own)
        cut = statistics.fmean(not drawn[j].finished for j in own)
        assert record["frac_truncated"] == pytest.approx(cut, abs=1e-12)
        x, y = (drift.embed(base, [r[j].ids for j in own]) for r in (drawn, before))
        near = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(x, y, strict=True)]
        assert record["similarity"] == pytest.approx(near, abs=1e-6)
        other = [float(y[j] @ y[j - 1] / (y[j].norm() * y[j - 1].norm())) for j in range(6)]
        assert record["similarity_base"] == pytest.approx(other, abs=1e-6)
    for key, numbers in result["responses"][name]["tiny_math"].items():
        assert numbers["mean"] == pytest.approx(statistics.fmean(
            statistics.fmean(v) if isinstance(v := r[key], list) else v for r in mine))
    assert result["responses"][name]["tiny_math"]["sequence_kl"]["mean"] > 0
    table = result["mmd"]["mmd2"]
    assert result["mmd"]["n"] == 4 and table["tiny_math"]["tiny_logic"] > 0.01


def test_embedder_and_run_folder(folders, tmp_path, monkeypatch):
    """--embedder sees text; a run's folder stands for its last checkpoint."""
    class Fake:
        def __init__(self, name):
            assert name == "some/model"

        def encode(self, texts):
            return np.array([[1.0, len(text)] for text in texts], dtype=np.float32)
    monkeypatch.setattr(drift.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers",
                        SimpleNamespace(SentenceTransformer=Fake))
    for step, kind in (("000001", "llama"), ("000002", "llama moved")):
        shutil.copytree(folders[kind], tmp_path / "run" / f"ckpt-{step}")
    (tmp_path / "run" / "log.jsonl").write_text("")
    args = drift.get_args(["--base", folders["llama"], "--model", str(tmp_path / "run"),
                           "--prompts", "tiny_math,tiny_logic", "--n", "0", "--limit", "5",
                           "--embedder", "some/model", "--out", str(tmp_path / "drift.json")])
    result = drift.main(args)
    assert result["responses"] == {str(tmp_path / "run"): {}}  # --n 0
    assert result["weights"][str(tmp_path / "run")]["all"]["density"]["mean"] > 0.5
    assert result["mmd"]["width"] >= 1  # lengths are whole numbers


def test_one_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stop:
        drift.get_args(["--model", "tiny"])
    assert stop.value.code == 2 and "without torchrun" in capsys.readouterr().err
