"""The plan of a run against what the run takes: SmolLM2-135M's shape, real steps on a CPU.

    PYTHONPATH=. python tests/test_plan.py      # all cases; the tests run a FEW of them

Each case is a run of the train script in forked ranks, its responses made up. Measured is the most
resident memory (VmHWM) while loading and in training, less what the process held before the model
was built, with a malloc that gives back what is freed. Weights are random: memory does not depend
on them. SmolLM2's GGUF has this config.
"""
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import worker
from transformers import AutoModelForCausalLM, LlamaConfig

import checkpoint
import common
import loading
import logbook
import packing
import ranks
import rollout
import train_grpo
import train_sdpo
from data import batches
from rollout import Rollout
from tools import plan

SMOLLM2 = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
               num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
               eos_token_id=49151, bos_token_id=None, pad_token_id=None)
SCRIPTS = {"grpo": train_grpo, "sdpo": train_sdpo}
# algorithm, ranks, whether logits come in chunks, flags
CASES = {f"{script}-{dtype}-{ranks}-{kind}": (
    script, ranks, kind != "whole", f"--param_dtype {dtype}" + " --fsdp on" * (ranks > 1) +
    " --checkpoint_activations" * (kind == "recomputed"))
    for script in SCRIPTS for dtype in ("float32", "bfloat16") for ranks in (1, 2)
    for kind in ("chunks", "whole", "recomputed")}
FEW = ["grpo-float32-2-chunks"]
FLAGS = ("--data x --model tiny --eval_every 0 --ref_every 0 --save_every 0 --steps 1 --quiet "
         "--updates 1 --group 4 --max_prompt 60 --max_new 64")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # freed is freed


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def arguments(case, out):
    script, ranks, _, flags = CASES[case]
    flags += " --max_teacher_prompt 124 --feedback always" * (script == "sdpo")
    return SCRIPTS[script].get_args(
        [*FLAGS.split(), *flags.split(), "--prompts", str(ranks), "--out", str(out)])


def rank(case, out):
    """One rank of a case, in a process of its own: writes what its phases took."""
    script, _, chunks, _ = CASES[case]
    torch.set_num_threads(1)
    worker.install_task()
    took, before = {}, status("VmRSS")

    def load(name, dtype):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2), dtype=dtype)
        model.states = packing._states.__get__(model.eval())
        model.plain_head = model.can_pack = True  # as packing.probe finds
        return model, worker.make_tokenizer()

    def resume(args, model, optimizer, teacher):  # moments, as from the second step on
        took["load"] = status("VmHWM") - before
        for p in model.parameters():
            optimizer.state[p] = dict(step=torch.tensor(1.0), exp_avg=torch.full_like(p, 1e-3),
                                      exp_avg_sq=torch.full_like(p, 1e-3))
        return {"step": 0}

    def sampler(args, model, tokenizer):  # responses of full length
        def sample(prompts, numbers, group, max_new, key):
            return [Rollout(n * group + g, [n + 5] * args.max_prompt, [7] * max_new,
                            torch.zeros(max_new), torch.zeros(max_new), False, "no " * 60)
                    for n in numbers for g in range(group)]
        return sample

    def score(task, rollouts, *_):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        return torch.arange(len(rollouts)).remainder(2).float(), ["no " * 60] * len(rollouts)

    def log_line(original, *args):
        took["learn"] = status("VmHWM") - before
        return original(*args)
    loading.load_model, checkpoint.resume, checkpoint.save = load, resume, lambda *_: None
    rollout.sampler, batches.score = sampler, score
    worker.wrap(logbook, "log_line", log_line)
    packing.CHUNK = packing.CHUNK if chunks else 2**40
    SCRIPTS[script].main(arguments(case, out))
    Path(f"{out}.{ranks.rank()}.json").write_text(json.dumps(took))


def measured(case, out, port):
    """Bytes by phase of a rank, the most of all ranks."""
    worker.run = lambda job: rank(case, out)
    job = dict(files=str(out), ranks=CASES[case][1], argv=[], port=port)
    pids = [worker.start(job, k) for k in range(job["ranks"])]
    for k, pid in enumerate(pids):
        assert os.waitpid(pid, 0)[1] == 0, Path(f"{out}.rank{k}.txt").read_text()[-2000:]
    took = [json.loads(Path(f"{out}.{k}.json").read_text()) for k in range(job["ranks"])]
    return {phase: max(one[phase] for one in took) for phase in took[0]}


def planned(case, out):
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(CASES[case][1]), "0"
    chunk = packing.CHUNK
    packing.CHUNK = chunk if CASES[case][2] else 2**40
    try:
        parts = plan.memory(arguments(case, out), LlamaConfig(**SMOLLM2))
        assert parts["bf16"] == 2 * 134_515_008  # however many copies are loaded
        return parts
    finally:
        packing.CHUNK = chunk
        del os.environ["WORLD_SIZE"], os.environ["RANK"]


@pytest.mark.parametrize("case", FEW)
def test_plan(case):
    done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True,
                          env={**os.environ, **MALLOC, "PYTHONPATH": str(common.ROOT)},
                          timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    name, *found = done.stdout.split()
    assert name == case and len(found) == 6
    for planned, took in zip(found[1::3], found[2::3]):
        assert float(planned) == pytest.approx(float(took), rel=0.15), done.stdout


@pytest.mark.parametrize(("gpu_gb", "told"), [
    ("80", "  fits\n"), ("2.06", "would with --checkpoint_activations --tokens_per_micro 4096\n")])
def test_show(gpu_gb, told):
    """--plan says what fits and stops before anything is loaded; what does not fit is told how. In
    a process of its own, as it is used: torch's fake tensors have crashed one that went on."""
    done = subprocess.run([sys.executable, "train_sdpo.py", "--tiny", "--plan", "--gpu_gb", gpu_gb],
                          cwd=common.ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and told in done.stdout, done.stderr[-2000:]


def test_weights_alone_too_large(tmp_path):
    """Of flags that help only together each is found, also where not even the weights fit."""
    LlamaConfig(vocab_size=512, hidden_size=4096, intermediate_size=11008, num_hidden_layers=2,
                num_attention_heads=32).save_pretrained(tmp_path)
    flags = (f"--plan --gpu_gb 7.3 --model {tmp_path} --ema .05 --prompts 1 --group 2 --updates 1 "
             "--max_prompt 64 --max_new 64")
    done = subprocess.run([sys.executable, "train_sdpo.py", *flags.split()], cwd=common.ROOT,
                          capture_output=True, text=True, timeout=300, check=False)
    told = done.stdout + done.stderr[-2000:]
    assert "it would with" in told and "--ref_every 0 --param_dtype bfloat16\n" in told


def test_published_sizes():
    """The table of sizes gives the models' published numbers of parameters (arXiv:2505.09388)."""
    for size, billions in (("0.6B", 0.596), ("32B", 32.8)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(plan.read_config(f"Qwen/Qwen3-{size}"))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


if __name__ == "__main__":
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    for case in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("localhost", 0)) as one:
            port = one.getsockname()[1]
            one.close()
            took = measured(case, Path(folder, "run"), port)
            parts = planned(case, Path(folder, "again"))
        print(f"{case:28}", *(f"{phase} {parts[phase] / 2**20:.0f} {took[phase] / 2**20:.0f}"
                              for phase in took), flush=True)
    os._exit(0)  # as common.parse does after a plan
