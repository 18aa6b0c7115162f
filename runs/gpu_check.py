"""One GPU, a few minutes, nothing downloaded: is it right there, how fast, and as the plan says?

Both trainers take real steps from random weights of Qwen3-1.7B's and 4B's shape, and from the tiny
base; prompts and rewards are made up. The JSON holds, for each model: how far the gradient and the
log-probabilities of a packed batch are from those of plain rows and of small micro-batches, in the
dtype that it trains in; seconds, tokens, peak memory of a step, and the plan's word for it; FLOPs
of the training part as a share of what a matmul reaches on this machine. Exit code 1: `failed`.

    python runs/gpu_check.py --out results/gpu_check.json
    python runs/gpu_check.py --smoke                          # small shapes, a CPU, under a minute
"""
import argparse
import contextlib
import json
import math
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import checkpoint  # noqa: E402
import common  # noqa: E402
import loading  # noqa: E402
import logbook  # noqa: E402
import losses  # noqa: E402
import packing  # noqa: E402
import ranks  # noqa: E402
import rollout  # noqa: E402
import train_grpo  # noqa: E402
import train_sdpo  # noqa: E402
from data import batches  # noqa: E402
from tools import plan  # noqa: E402
from tools.bench import flops  # noqa: E402

CUDA = torch.cuda.is_available()
# bounds: mean |log-probability| and relative L2 of gradients, far above rounding, far below a fault
BOUNDS = {"bfloat16": (0.03, 0.05), "float32": (1e-4, 1e-4)}


def matmul_rate(dtype, n):
    """FLOPs a second, the best of some."""
    a, best = torch.randn(n, n, device="cuda" if CUDA else "cpu").to(dtype), math.inf
    for _ in range(20):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for it
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def make(config, device):
    """A random model, noted as packing.probe does, and the tiny tokenizer."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    note = packing.probe(model.eval())
    assert not note, note
    return model, AutoTokenizer.from_pretrained(ROOT / "data" / "tiny_model")


def invariances(model, args):
    """{how a batch is split: [mean |change of a log-probability|, relative change of the gradient]}
    beside the packed batch; two prompts of four responses."""
    device = model.device
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, model.config.vocab_size, (n,), generator=draw).tolist()
           for n in (90, 70, 64, 50, 33, 64, 17, 5, 41, 64)]
    prompts, responses = [ids[k // 4] for k in range(8)], ids[2:]

    def passes(split, pack):
        out, model.grads = [], None
        for rows in split:
            hidden = packing.response_hidden(model, rows, prompts, responses, pack)
            label = torch.tensor([t for i in rows for t in responses[i]], device=device)
            with torch.no_grad():
                out.append(losses.token_logprobs(packing.head(model, hidden), label))
            packing.head_loss(model, hidden, lambda logits, at, label=label: -losses.token_logprobs(
                logits, label[at])).backward()
        layers = model.get_input_embeddings().weight, *model.model.layers[0].parameters()
        grads = torch.cat([p.grad.flatten() for p in layers])
        model.zero_grad(set_to_none=True)
        return torch.cat(out), grads
    whole, grads = passes([range(8)], True)
    found = {}
    for name, split, pack in (("plain", [range(8)], False), ("packed by 4", [range(4), range(4, 8)],
                              True), ("plain, one by one", [[i] for i in range(8)], False)):
        logprobs, other = passes(split, pack)
        found[name] = [(logprobs - whole).abs().mean().item(),
                       ((other - grads).norm() / grads.norm()).item()]
    return found


def train(script, name, model, tokenizer, flags, folder):
    """The log lines of a run of the script from this model, and its flags."""
    args = script.get_args([*flags.split(), "--model", "tiny", "--data", "tiny", "--quiet", "--out",
                            f"{folder}/{name}"])
    rows = []
    for k in range(64):  # 11 tokens a repetition
        chat = [{"role": "user", "content": f"{k} " + "what is 1 + 2 ? " * (args.max_prompt // 12)}]
        rows.append({"id": k, "messages": chat, "answer": "3", "opened": "",
                     "ids": rollout.encode(tokenizer, chat)[-args.max_prompt:]})
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in (
                (loading, "load_model", lambda *_: (model, tokenizer)),
                (checkpoint, "save", lambda *_: None),
                (batches, "load_rows", lambda *_: rows),
                (batches, "score", lambda task, made, *_: (
                    torch.arange(len(made)).remainder(2).float(), ["no"] * len(made)))):
            stack.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, value)
        script.main(args)
    return [json.loads(line) for line in Path(args.out, "log.jsonl").open()], args


def main():
    parser = common.Parser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--out", default="runs/gpu_check.json", help="where the numbers go")
    args = parser.parse_args()
    if not (CUDA or args.smoke):
        parser.error("there is no GPU here; --smoke checks small shapes on the CPU")
    dtype, began = "bfloat16" if CUDA else "float32", time.perf_counter()
    device = ranks.setup(argparse.Namespace(seed=0, tiny=args.smoke))
    rate = matmul_rate(getattr(torch, dtype), 512 if args.smoke else 8192)
    configs = {"tiny": plan.read_config("tiny")}
    if args.smoke:
        configs["small"] = Qwen3Config(
            vocab_size=4096, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, intermediate_size=384, tie_word_embeddings=True)
    else:
        configs |= {f"Qwen3-{size}": plan.read_config(f"Qwen/Qwen3-{size}")
                    for size in ("1.7B", "4B")}
    P, T, G, N = (64, 32, 4, 2) if args.smoke else (512, 512, 8, 4)
    out, failed = {"matmul_tflops": rate / 1e12, "dtype": dtype, "models": {}}, []
    for name, config in configs.items():
        one = out["models"][name] = {}
        for script in (train_grpo, train_sdpo):
            model, tokenizer = (loading.load_model("tiny") if name == "tiny"
                                else make(config, device))
            if script is train_grpo:
                model = ranks.distribute(model, train_args := train_grpo.get_args(
                    ["--tiny", "--dtype", dtype, "--rollout", "hf"]), device)
                one["invariances"] = invariances(model, train_args)
                for how, (change, gradient) in one["invariances"].items():
                    if not (change < BOUNDS[dtype][0] and gradient < BOUNDS[dtype][1]):
                        failed.append(f"{name}: {how}: {change:.2g} nats, gradient {gradient:.2g}")
            flags = (f"--rollout hf --dtype {dtype} --steps 3 --prompts {N} --group {G} "
                     f"--updates 1 --max_prompt {P} --max_new {T} --tokens_per_micro 8192 "
                     "--eval_every 0 --ref_every 0 --save_every 0")
            if script is train_sdpo:
                flags += f" --feedback always --max_teacher_prompt {P + 128} --ema 0.05"
            with tempfile.TemporaryDirectory() as folder:
                if CUDA:
                    torch.cuda.reset_peak_memory_stats()
                lines, run = train(script, "run", model, tokenizer, flags, folder)
            del model
            last = lines[-1]
            todo = flops(config, [(P, 0, [T] * G)] * N, [(P, 0, [T] * G)] * N, [
                (P, 0, [T])] * N * G if script is train_sdpo else None)
            found = one[script.__name__] = {
                key: last[key] for key in ("loss", "grad_norm", "jsd", "length", "sample_seconds",
                                           "train_seconds", "sample_tokens_per_s")}
            found["mfu"] = (todo["student"] + todo["teacher"]) / last["train_seconds"] / rate
            found["peak_gb"] = max(line["peak_memory_gb"] for line in lines)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
                planned = alone.submit(  # torch's fake tensors have crashed a process that went on
                    plan.memory, run, config, CUDA and torch.cuda.mem_get_info()[1]).result()
            found["planned_gb"] = max(planned["learn"], planned["sample"]) / plan.GB
            if last["skipped"] or not math.isfinite(last["loss"] + last["grad_norm"]):
                failed.append(f"{name}: {script.__name__}: loss {last['loss']}")
            if CUDA and name != "tiny" and not 0.85 < found["planned_gb"] / found["peak_gb"] < 1.15:
                failed.append(f"{name}: {script.__name__}: {found['peak_gb']:.1f} GB, planned "
                              f"{found['planned_gb']:.1f}")
    out |= {"seconds": time.perf_counter() - began, "failed": failed,
            **{k: v for k, v in logbook.describe(args).items() if k != "args"}}
    logbook.write_json(args.out, out)
    print(json.dumps(out, indent=1))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
