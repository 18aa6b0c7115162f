"""The numbers of a run, recomputed from its checkpoints and samples by a way of its own: NumPy on
the safetensors files, transformers' plain forward pass in float64 a response at a time, the
verifier on the text that was kept. Nothing of drift.py, packing.py, losses.py or data/scores.py.
"""
import itertools
import json
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import continual
import data
import drift
import loading
import rollout

BASE, NAMES, N, LIMIT = common.ROOT / "data" / "tiny_model", ("tiny_math", "tiny_logic"), 4, 3
FLAGS = """--tiny --quiet --eval_every 0 --prompts 4 --group 4 --lr 3e-3 --warmup 0 --ref_every 0
    --order math,science --stage_steps 2 --limit 6 --n 3""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, models, continual.json, drift.json, drift.jsonl) of two stages of two steps."""
    out = tmp_path_factory.mktemp("run") / "sdpo"
    continual.main(continual.get_args([
        *FLAGS, "--tasks", ",".join(NAMES), "--out", str(out)]))
    models = [str(out / "1-math"), str(out / "2-science")]
    drift.main(drift.get_args(["--tiny", "--model", *models, "--prompts", ",".join(NAMES), "--n",
                               str(N), "--limit", str(LIMIT), "--out", str(out / "drift.json")]))
    records = [json.loads(line) for line in (out / "drift.jsonl").open()]
    files = [json.loads((out / f"{name}.json").read_text()) for name in ("continual", "drift")]
    return out, models, *files, records


def weights(folder):
    return {k.removeprefix("model.").removesuffix(".weight"): w.astype(np.float64)
            for k, w in load_file(folder / "model.safetensors").items()
            if "layers." in k and w.ndim == 2}


def bf16(w):
    """Rounded to the nearest bfloat16, to even where two are as near, by its bits."""
    bits = w.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def largest(w, rank):
    """Mask of the 5% largest entries of the best approximation of that rank."""
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    size = np.abs((u[:, :rank] * s[:rank]) @ vt[:rank])
    return size >= np.sort(size, axis=None)[-max(1, round(0.05 * w.size))]


def test_weights(run):
    """Spectrum, rotation, masks and change of every matrix of both checkpoints."""
    out, models, _, summary, records = run
    before, moved = weights(BASE), 0.0
    for k, folder in enumerate(("1-math/ckpt-000002", "2-science/ckpt-000002")):
        after = weights(out / folder)
        found = {r["matrix"]: r for r in records if "matrix" in r and r["model"] == models[k]}
        assert found.keys() == before.keys() == after.keys()
        for name, w0 in before.items():
            wk, rank = after[name], max(1, min(64, min(w0.shape) // 4))
            (u0, s0, _), (u, s, _) = (np.linalg.svd(w, full_matrices=False) for w in (w0, wk))
            angle = np.degrees(np.arccos(np.linalg.svd(u0[:, :rank].T @ u[:, :rank])[1].min()))
            m0, mk, changed = largest(w0, rank), largest(wk, rank), bf16(w0) != bf16(wk)
            assert found[name]["rank"] == rank
            for key, value in {
                    "nss": np.linalg.norm(s - s0) / np.linalg.norm(s0), "rotation": angle,
                    "pm_overlap": 100 * (m0 & mk).sum() / (m0 | mk).sum(),
                    "pm_update": 100 * (m0 & changed).sum() / (m0 | changed).sum(),
                    "density": changed.mean(),
                    "relative_change": np.linalg.norm(wk - w0) / np.linalg.norm(w0)}.items():
                assert found[name][key] == pytest.approx(value, rel=1e-6, abs=1e-9), (name, key)
            moved = max(moved, found[name]["rotation"])
        mean = np.mean([r["nss"] for r in found.values()])
        assert summary["weights"][models[k]]["all"]["nss"]["mean"] == pytest.approx(mean)
    assert moved > 1  # degrees: there is something to measure


def distributions(model, prompt, response):
    """Log-probabilities of every next token of a response, (T, V) float64, no padding, no cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1).numpy()


def test_sequence_kl_and_excess(run):
    """KL, log-ratio, success and excess drift of the last checkpoint, a response at a time."""
    out, models, _, _, records = run
    base, last = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
                  for path in (BASE, out / "2-science" / "ckpt-000002"))
    tokenizer, sampled, kls = AutoTokenizer.from_pretrained(BASE), [], []
    for path in (BASE, models[1]):
        sampled.append(loading.load_model(path)[0])
    for name in NAMES:
        task = data.TASKS[name.removeprefix("tiny_")]
        rows = {row["id"]: row for row in task.load("tiny", "test")}
        mine = [r for r in records if r.get("prompts") == name and r["model"] == models[1]]
        prompts = [rollout.encode(tokenizer, rows[r["id"]]["messages"]) for r in mine]
        assert len(mine) == LIMIT
        drawn, right = [], []
        for model in sampled:
            drawn.append(rollout.sample(model, tokenizer, prompts, range(LIMIT), N, 64,
                                        ("drift", 0, name)))
            right.append([task.score(r.text, rows[mine[i // N]["id"]]["answer"])[0] == 1
                          for i, r in enumerate(drawn[-1])])
        for i, record in enumerate(mine):
            kl, ratio = [], []
            for r in drawn[1][i * N:(i + 1) * N]:
                p, q = (distributions(m, r.prompt, r.ids) for m in (last, base))
                kl.append((np.exp(p) * (p - q)).sum())
                ratio.append((p - q)[np.arange(len(r.ids)), r.ids].sum())
            kls.append(np.mean(kl))
            assert record["sequence_kl"] == pytest.approx(kls[-1], rel=1e-4, abs=1e-4)
            assert record["log_ratio"] == pytest.approx(np.mean(ratio), rel=1e-4, abs=1e-3)
            x0, x = (row[i * N:(i + 1) * N] for row in right)
            assert (record["success_base"], record["success"]) == (np.mean(x0), np.mean(x))
            needed = bernoulli(x, x0)
            assert record["excess_add_half"] == pytest.approx(kls[-1] - needed, abs=1e-3)
            less = np.mean([bernoulli(x[:j] + x[j + 1:], x0[:j] + x0[j + 1:]) for j in range(N)])
            assert record["excess_jackknife"] == pytest.approx(
                kls[-1] - (N * needed - (N - 1) * less), abs=1e-3)
    assert max(kls) > 0.01


def bernoulli(x, x0):
    """kl(a || p_0) of two lists of successes, add-half."""
    a, p = ((sum(v) + 0.5) / (len(v) + 1) for v in (x, x0))
    return a * math.log(a / p) + (1 - a) * math.log((1 - a) / (1 - p))


def test_distance_of_prompts(run):
    """MMD^2 of the base's mean hidden states, one kernel width for all sets."""
    _, models, _, summary, records = run
    base, tokenizer = (kind.from_pretrained(BASE) for kind in (AutoModelForCausalLM, AutoTokenizer))
    sets = {}
    for name in NAMES:
        task = data.TASKS[name.removeprefix("tiny_")]
        rows = {row["id"]: row for row in task.load("tiny", "test")}
        for r in (r for r in records if r.get("prompts") == name and r["model"] == models[0]):
            ids = torch.tensor([rollout.encode(tokenizer, rows[r["id"]]["messages"])])
            with torch.no_grad():
                states = base.double()(ids, output_hidden_states=True).hidden_states[-1]
            sets.setdefault(name, []).append(states[0].mean(0).tolist())
    pool = [x for own in sets.values() for x in own]
    width = np.median([math.dist(x, y) for x, y in itertools.combinations(pool, 2)])

    def kernel(a, b):
        return np.mean([[math.exp(-math.dist(x, y)**2 / (2 * width**2)) for y in b] for x in a])
    x, y = (sets[name] for name in NAMES)
    found = summary["mmd"]["mmd2"][NAMES[0]][NAMES[1]]
    assert found == pytest.approx(kernel(x, x) + kernel(y, y) - 2 * kernel(x, y), abs=1e-5) != 0


def test_matrix(run):
    """Every score, its error and what was learned and forgotten, from the text that was kept."""
    out, _, result, _, _ = run
    means = {}  # (benchmark, k) -> of each prompt
    for k in range(3):
        for line in map(json.loads, (out / f"eval-{k}.jsonl").open()):
            task = data.TASKS[line["benchmark"].removeprefix("tiny_")]
            answer = {r["id"]: r["answer"] for r in task.load("tiny", "test")}[line["id"]]
            scored = [task.score(text, answer)[0] for text in line["responses"]]
            assert scored == line["rewards"] and len(scored) == 3
            means.setdefault((line["benchmark"], k), []).append(np.mean(scored))
    for name in NAMES:
        for k, cell in enumerate(result["R"][name]):
            own = means[name, k]
            assert cell["mean"] == pytest.approx(np.mean(own)) and len(own) == 6
            assert cell["se"] == pytest.approx(np.std(own, ddof=1) / 6**.5)
    math_row = result["domains"][0]
    base, now, last = (np.mean(means["tiny_math", k]) for k in range(3))
    assert math_row["learned"]["mean"] == pytest.approx(now - base)
    assert math_row["forgotten"]["mean"] == pytest.approx(now - last)
    assert result["backward_transfer"]["mean"] == pytest.approx(last - now)
