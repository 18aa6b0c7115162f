"""Small random models, a task with mixed rewards, and real runs of the scripts as processes.

    python tests/worker.py jobs.json

forks one process a rank for every job: ranks that torchrun would start, with the environment that
it sets, without its seconds of imports. A job names a script, its flags and what is done to it: SGD
in place of AdamW, arithmetic in float64, a fault in the code, a SIGKILL at some point. Each rank
leaves what it saw in NAME.rank0.pt: gradients before clipping, samples, sizes of micro-batches.
"""
import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from tokenizers import Tokenizer, decoders  # noqa: E402
from tokenizers import models as token_models  # noqa: E402
from transformers import (  # noqa: E402
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import checkpoint  # noqa: E402
import data  # noqa: E402
import loading  # noqa: E402
import logbook  # noqa: E402
import losses  # noqa: E402
import packing  # noqa: E402
import ranks  # noqa: E402
import teacher  # noqa: E402
from data import batches as rows_of_a_run  # noqa: E402

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<unk>"]
LETTERS = sorted("abcdefghijklmnopqrstuvwxyzHYFNTS0123456789 .,:?'\n\\{}/=+-")
TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}"
            "{% endif %}")


# ---- models --------------------------------------------------------------------------------------

def make_tokenizer(template=TEMPLATE):
    """One token a character, no pad token."""
    names = [*SPECIAL, *LETTERS]
    tokenizer = Tokenizer(token_models.BPE({c: i for i, c in enumerate(names)}, [],
                                           unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>",
                                        unk_token="<unk>", clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:4]})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    return tokenizer


def make_model(kind, vocab, seed=0):
    """A random model that is far from uniform, of 2 layers."""
    torch.manual_seed(seed)
    small = dict(vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                 initializer_range=0.2, eos_token_id=0, bos_token_id=None, pad_token_id=None)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=vocab, n_embd=32, n_layer=2, n_head=4, n_positions=512, eos_token_id=0,
            bos_token_id=0, initializer_range=0.2))
    elif kind in ("llama", "untied"):
        model = LlamaForCausalLM(LlamaConfig(**small, tie_word_embeddings=kind == "llama"))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**small, head_dim=8, tie_word_embeddings=True))
    elif kind == "gemma2":
        model = Gemma2ForCausalLM(Gemma2Config(
            **small, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=3.0,
            sliding_window=16))
    return model.eval()


def make_folders(root):
    """{kind: folder} of saved models with their tokenizer. Many ids stop a response, so that
    lengths vary; generation_config asks for a decoding that no run may take over."""
    tokenizer = make_tokenizer()
    stop = [0, *tokenizer.convert_tokens_to_ids(list("eqz7o.tS"))]
    for kind in ("gpt2", "llama", "untied", "qwen3", "other"):
        model = make_model("llama" if kind == "other" else kind, len(tokenizer), kind == "other")
        model.generation_config.eos_token_id = stop
        model.generation_config.do_sample = True
        model.generation_config.top_k, model.generation_config.temperature = 3, 0.5
        model.save_pretrained(root / kind)
        tokenizer.save_pretrained(root / kind)
    return {path.name: str(path) for path in root.iterdir()}


# ---- a task --------------------------------------------------------------------------------------

def load(source, split="train", limit=None, seed=0):
    """20 rows; prompts of different lengths. Of "twins" two rows share one prompt."""
    rows = [{"messages": [{"role": "user",
                           "content": f"{source} {split} {i}: " + "and " * (i % 4) + "say it?"}],
             "answer": str(i), "id": i} for i in range(20)]
    if source == "twins":
        rows[1]["messages"] = rows[0]["messages"]
    return rows[:limit]


def score(text, answer):
    """Every third prompt always fails, one in seven never does, the rest depends on the text."""
    if int(answer) % 3 == 0:
        return 0.0, "no, never"
    luck = zlib.crc32(f"{text} {answer}".encode()) % 5 < 2
    return float(luck or int(answer) % 7 == 1), "" if luck else f"no: {len(text)} letters"


def answer_of(text):
    return text[:1] or None


def install_task(put=setattr):
    for name in ("math", "science"):
        for function in (load, score, answer_of):
            put(data.TASKS[name], function.__name__, function)


# ---- a rank --------------------------------------------------------------------------------------

def wrap(module, name, around):
    """Replace module.name by a function that calls around(original, *args)."""
    original = getattr(module, name)

    def wrapped(*args, **kwargs):
        return around(original, *args, **kwargs)
    setattr(module, name, wrapped)


def record(job, seen):
    """Note what passes by; change nothing."""
    def clip(original, parameters, limit):
        parameters = list(parameters)
        seen["grads"].append([checkpoint.whole(p.grad).clone() for p in parameters])
        seen["sharded"] = isinstance(parameters[0], checkpoint.DTensor)
        return original(parameters, limit)

    def scores(original, task, rollouts, batch, group):
        rewards, told = original(task, rollouts, batch, group)
        if job.get("zero"):  # those of odd prompts, which all lie on rank 1 of 2, or of all
            for g, (number, _) in enumerate(batch):
                if number % 2 or job["zero"] == "all":
                    rewards[g * group:(g + 1) * group] = 0
        if group == 4:  # else it is an evaluation
            seen["rows"].append({r.row: (r.ids, reward) for r, reward in
                                 zip(rollouts, rewards.tolist(), strict=True)})
            seen["prompts"].append([(n, row["id"]) for n, row in batch])
        return rewards, told

    def micro(original, model, rows, passes, *rest):
        batches = original(model, rows, passes, *rest)
        if len(passes) == 2 or job["script"] == "train_grpo":
            seen["micro"].append([len(b) for b in batches])
        return batches

    wrap(torch.nn.utils, "clip_grad_norm_", clip)
    wrap(rows_of_a_run, "score", scores)
    wrap(packing, "micro_batches", micro)


def float64():
    """Hugging Face's RMS norm computes in float32 whatever the model's dtype; here it does not."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
    LlamaRMSNorm.forward = forward


def refusal(parse, capsys, monkeypatch):
    """What bad flags are answered with: exit code 2 and one line, before anything is loaded."""
    import pytest  # here, as a worker has no need of it

    def never(*a, **k):
        raise AssertionError("something was loaded")
    monkeypatch.setattr(loading, "load_model", never)
    monkeypatch.setattr(ranks, "setup", never)
    with pytest.raises(SystemExit) as stop:
        parse()
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.count("\n") == 1 and "Traceback" not in told, told
    return told


def mutate(fault):
    """A fault that the comparison of gradients has to find."""
    if fault == "denominator":
        wrap(losses, "aggregate_weights", lambda f, *a: (f(*a)[0], f(*a)[1] * 1.01))
    elif fault == "row":
        wrap(packing, "micro_batches", lambda f, model, rows, *a: f(  # a list: those that learn
            model, rows[1:] if isinstance(rows, list) else rows, *a))
    elif fault == "mask":
        wrap(packing, "tokens", lambda f, rows, rollouts, masks, *a: f(
            rows, rollouts, [m.roll(1) for m in masks], *a))
    elif fault == "no context":
        wrap(teacher, "teacher_prompt_ids",
             lambda f, encode, messages, *a: (encode(messages), False))
    elif fault == "index":
        def shifted(f, *a):
            *rest, index = f(*a)
            return *rest, (index - 1).clamp(min=0)
        wrap(packing, "layout", shifted)


def die(kill):
    """SIGKILL when the point is reached for the n-th time."""
    modules = {"log_line": logbook, "write": logbook.Log, "save_file": checkpoint,
               "rename": os, "save": checkpoint, "rmtree": checkpoint.shutil,
               "write_json": logbook}
    left = [kill["nth"]]

    def around(original, *args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            if kill.get("after"):
                original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    wrap(modules[kill["point"]], kill["point"], around)


def run(job):
    """One rank of one job, in this process."""
    torch.set_num_threads(1)
    install_task()
    seen = {"grads": [], "rows": [], "prompts": [], "micro": []}
    if job.get("fault"):
        mutate(job["fault"])
    if job["script"] != "eval":
        record(job, seen)
    if job.get("f64"):
        float64()
    if job.get("sgd"):
        ranks.make_optimizer = lambda model, args: torch.optim.SGD(model.parameters(), args.lr)
    if job.get("kill") and ranks.rank() in job["kill"].get("ranks", [0, 1]):
        die(job["kill"])
    script = importlib.import_module(job["script"])
    sys.argv = [f"{job['script']}.py", *job["argv"]]
    seen["result"] = script.main(script.get_args(job["argv"]))
    torch.save(seen, f"{job['files']}.rank{ranks.rank()}.pt")


def truncate(out):
    """The newest checkpoint loses the end of its weights, as when a disk fills up."""
    path = sorted(out.glob("ckpt-*"))[-1] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def tear(out):
    """The last line of the log was being written."""
    with open(out / "log.jsonl", "a") as file:
        file.write('{"step": 99, "rew')


BEFORE = {"truncate": truncate, "tear": tear}


# ---- all jobs ------------------------------------------------------------------------------------

def start(job, rank):
    """Fork a rank; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with (open(f"{job['files']}.rank{rank}.txt", "w") as file,
              contextlib.redirect_stderr(file), contextlib.redirect_stdout(file)):
            if job["ranks"] > 1 or "--fsdp" in job["argv"]:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank),
                               "WORLD_SIZE": str(job["ranks"]), "MASTER_ADDR": "localhost",
                               "MASTER_PORT": str(job["port"])}
            try:
                run(job)
                code = 0
            except SystemExit as stop:
                code = stop.code or 0
            except BaseException:
                traceback.print_exc(file=file)
    finally:
        os._exit(code)


def main(path):
    jobs = json.loads(Path(path).read_text())
    for name in {job["script"] for job in jobs}:
        importlib.import_module(name)
    for job in jobs:
        for command in job["before"]:
            BEFORE[command](Path(job["out"]))
        began = time.monotonic()
        codes, waiting = {}, {start(job, rank): rank for rank in range(job["ranks"])}
        while waiting:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                codes[waiting.pop(pid)] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() - began > job.get("timeout", 150):
                for late in list(waiting):
                    os.kill(late, signal.SIGKILL)
                    os.waitpid(late, 0)
                    codes[waiting.pop(late)] = "timeout"
            else:
                time.sleep(0.005)
        result = {"codes": [codes[r] for r in range(job["ranks"])],
                  "seconds": time.monotonic() - began}
        Path(f"{job['files']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun: one job, which this process is a rank of
        run(json.loads(Path(sys.argv[1]).read_text())[0])
    else:
        main(sys.argv[1])
