"""The processes that tools/bench.py measures: a train script, or TRL's trainer, one step a turn.

Neither is changed. The train script's own functions are timed, and given their turn, prompts and
rewards, from outside; TRL's trainer is told by its callback.
"""
import collections
import importlib
import json
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
TOOLS = ROOT.parent / "shared/data/tools/tooluse_train_standin.jsonl"
OFF = ("eval_every", "save_every", "ref_every")  # what is no part of a step


# ---- what both get -------------------------------------------------------------------------------

def prompts(args, tokenizer):
    """As many as a step takes, so that every step has all: [{"messages", "answer"}]."""
    import data
    from rollout import encode
    if args.case == "tiny":
        return data.TASKS["math"].load("tiny", "train")[:args.prompts]
    if args.case == "tools":  # evenly over the lengths of 300 to 900 tokens
        rows = data.TASKS["tooluse"].load(str(TOOLS), "train")
        rows = {len(encode(tokenizer, row["messages"])): row for row in rows}
        fit = [rows[n] for n in sorted(rows) if 300 <= n <= 900]
        return [fit[(2 * k + 1) * len(fit) // (2 * args.prompts)] for k in range(args.prompts)]
    draw, found = random.Random(0), []
    for _ in range(args.prompts):
        a, b, c = (draw.randint(100, 999) for _ in range(3))
        text = f"What is {a} + {b} + {c}? Answer with one number."
        if args.case == "words":
            text = " ".join(f"w{draw.randrange(400)}" for _ in range(args.words))
        found.append({"messages": [{"role": "user", "content": text}], "answer": str(a + b + c)})
    return found


def prepare(args, folder):
    """Write the model to a folder that both load."""
    import torch
    if args.vocab:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(args.vocab)}, "w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=args.vocab, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            num_attention_heads=4, max_position_embeddings=8192, tie_word_embeddings=True))
    else:
        import loading
        model, tokenizer = loading.load_model(args.model)
    if not args.free:  # an EOS that is beyond the logits, so nothing ends before max_new
        tokenizer.add_special_tokens({"eos_token": "<|never|>"})
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- the processes -------------------------------------------------------------------------------

def peak_gb():
    """Most memory so far: of the GPU, or resident of this process (ru_maxrss has its parent's)."""
    import torch
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 / 1e9 for x in lines if x.startswith("VmHWM"))


class Turns:
    """A worker's end of the pipes: waits for its turn, then says what its step took."""

    def __init__(self):
        self.pipe, self.spent = os.fdopen(os.dup(1), "w"), collections.Counter()
        os.dup2(2, 1)  # what a library prints does not get into the pipe

    def begin(self):
        if not sys.stdin.readline():
            os._exit(0)  # the parent has enough
        self.spent.clear()
        self.start = time.perf_counter(), time.process_time()

    def end(self, **values):
        took = time.perf_counter() - self.start[0], time.process_time() - self.start[1]
        json.dump({"seconds": took[0], "cpu": took[1], "peak_gb": peak_gb(), **values,
                   "phases": dict(self.spent)}, self.pipe)
        print(file=self.pipe, flush=True)

    def timed(self, owner, name, phase):
        """Time a function from outside; phase: its name, or a function that gives it."""
        inner = getattr(owner, name)

        def outer(*args, **kwargs):
            start, key = time.perf_counter(), phase() if callable(phase) else phase
            try:
                return inner(*args, **kwargs)
            finally:
                self.spent[key] += time.perf_counter() - start
        setattr(owner, name, outer)


def pass_of():
    import torch
    return "forward" if torch.is_grad_enabled() else "teacher"


def siblings(rows, prompts, responses):
    """[(length of a distinct prompt, tokens it shares with one before, [lengths of its responses])]
    of some rows."""
    import packing
    return [(len(prompts[branch[0]]), shared if k else 0, [len(responses[i]) for i in branch])
            for shared, branches in packing.families({i: prompts[i] for i in rows})
            for k, branch in enumerate(branches)]


def ours(args, folder, turns):
    """Run the train script, waiting for a turn before each step."""
    import torch
    from transformers import AutoConfig

    import logbook
    import packing
    import ranks
    import rollout
    from data import batches
    from tools.bench import flops
    script = importlib.import_module(f"train_{args.algorithm}")
    config = AutoConfig.from_pretrained(folder)
    for owner, name, phase in ((rollout, "sample", "sampling"), (packing, "head_loss", "head"),
                               (packing, "response_hidden", pass_of),
                               (torch.Tensor, "backward", "backward"),
                               (ranks, "optimizer_step", "optimizer")):
        turns.timed(owner, name, phase)
    batch, score = batches.batch, batches.score
    line, micro, step = logbook.log_line, packing.micro_batches, {}

    def rewards(task, rollouts, batch, group):
        step.update(sampled=siblings(range(len(rollouts)), [r.prompt for r in rollouts],
                                     [r.ids for r in rollouts]), learned=[], taught=[])
        return score(task, rollouts, batch, group) if args.rewards == "real" else (
            torch.tensor([float(i % 2 == 0) for i in range(len(rollouts))]), [""] * len(rollouts))

    def micro_batches(model, rows, passes, responses, *rest):
        step.update(zip(("learned", "taught"), (siblings(rows, prompts, responses)
                                                for prompts in passes), strict=False))
        return micro(model, rows, passes, responses, *rest)

    def log_line(*values):
        turns.end(flops=flops(config, **step), tokens=sum(sum(row) for *_, row in step["sampled"]))
        return line(*values)
    batches.batch = lambda *values: (turns.begin(), batch(*values))[1]
    batches.load_rows = lambda run, task, tokenizer: batches.fitting(
        prompts(args, tokenizer), task, tokenizer, run)
    batches.score, packing.micro_batches, logbook.log_line = rewards, micro_batches, log_line
    flags = dict(model=folder, data="tiny", task="tooluse" if args.case == "tools" else "math",
                 prompts=args.prompts, group=args.group, max_new=args.max_new, max_prompt=8192,
                 lr=1e-5, updates=1, steps=100000, out=f"{folder}/run", **dict.fromkeys(OFF, 0))
    flags = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    script.main(script.get_args([*flags, "--quiet", *args.flags]))


def trl(args, folder, turns):
    """Run TRL's trainer, waiting for a turn before each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    import data
    task = data.TASKS["tooluse" if args.case == "tools" else "math"]

    def reward(completions, completion_ids, answer, **_):
        turns.tokens = sum(map(len, completion_ids))
        return [task.score(c[0]["content"], json.loads(a))[0] if args.rewards == "real" else
                float(i % 2 == 0) for i, (c, a) in enumerate(zip(completions, answer, strict=True))]

    class Callback(TrainerCallback):
        def on_step_begin(self, *_, **__):
            turns.begin()

        def on_pre_optimizer_step(self, *_, **__):
            self.start = time.perf_counter()

        def on_optimizer_step(self, *_, **__):
            turns.spent["optimizer"] += time.perf_counter() - self.start

        def on_step_end(self, *_, **__):
            turns.end(tokens=turns.tokens)
    size = args.prompts * args.group
    shared = dict(
        output_dir=f"{folder}/trl", per_device_train_batch_size=size // args.accumulate,
        gradient_accumulation_steps=args.accumulate, num_generations=args.group, max_steps=100000,
        max_completion_length=args.max_new, temperature=1.0, top_p=1.0, top_k=0, epsilon=0.2,
        epsilon_high=0.28, beta=0.0, learning_rate=1e-5, lr_scheduler_type="constant",
        weight_decay=0.01, bf16=False, gradient_checkpointing=False, report_to="none", seed=0,
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), model_init_kwargs={"dtype": torch.float32})
    if args.algorithm == "grpo":
        from trl import GRPOConfig
        from trl import GRPOTrainer as Trainer
        config = GRPOConfig(**shared)
    else:
        from trl.experimental.sdpo import SDPOConfig
        from trl.experimental.sdpo import SDPOTrainer as Trainer
        config = SDPOConfig(**shared, distillation_mode="full_logits", distillation_alpha=0.5,
                            teacher_model_kind="base", max_prompt_length=None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{"prompt": row["messages"], "answer": json.dumps(row["answer"])}
            for row in prompts(args, tokenizer)]
    trainer = Trainer(model=folder, reward_funcs=reward, args=config, processing_class=tokenizer,
                      train_dataset=Dataset.from_list(rows), callbacks=[Callback()])
    inside = "_forward_logits" if args.algorithm == "sdpo" else "_get_per_token_logps_and_entropies"
    for owner, name, phase in ((trainer, "_generate", "sampling"), (trainer, inside, pass_of),
                               (trainer.accelerator, "backward", "backward")):
        turns.timed(owner, name, phase)
    trainer.train()


def head(args, topk, turns):
    """SDPO's loss of 8,192 tokens from hidden states on, V = args.vocab."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import losses
    import packing
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=args.vocab, hidden_size=64, num_hidden_layers=1,
                                         num_attention_heads=1, intermediate_size=64))
    packing.probe(model)
    hidden = torch.randn(8192, 64, requires_grad=True)
    told = hidden.detach() + torch.randn(8192, 64)

    def token_loss(logits, at):
        with torch.no_grad():
            teacher = packing.head(model, told[at])
        return losses.generalized_jsd(logits, teacher, topk=int(topk))
    turns.begin()
    packing.head_loss(model, hidden, token_loss).backward()
    turns.end(tokens=8192)


def main(args):
    import torch
    torch.set_num_threads(args.threads)
    who, what = args.worker
    {"ours": ours, "trl": trl, "head": head}[who](args, what, Turns())
