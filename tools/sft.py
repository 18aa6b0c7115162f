"""Supervised fine-tuning on gold answers: warms up a real model, or builds the tiny base.

A model that never solves a task has nothing to reinforce and no sibling to learn from. So it first
imitates right answers, a row's "response" or else task.render(answer), with the loss on the
assistant's tokens alone:  loss = - sum_t log p(y_t | x, y_<t) / response tokens of the step
With --tiny it makes a small model from nothing instead (its curriculum: data/tiny_base.py).

    python tools/sft.py --model SmolLM2.gguf --task science --data train.jsonl --out runs/warm
    python tools/sft.py --tiny --seed 0 --out data/tiny_model      # 18 minutes on a busy core
"""
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import data
import loading
import packing
import ranks
import rollout
from data import tiny_base
from data.tiny_base import IGNORED


def get_args(argv=None):
    parser = common.Parser(description=__doc__)
    add = parser.add_argument_group("model and data").add_argument
    add("--model", default="Qwen/Qwen3-4B", help="hub id, Hugging Face folder or .gguf file")
    add("--tiny", action="store_true", help="build the tiny base instead, on the six tiny domains")
    add("--task", default="math", choices=sorted(data.TASKS), metavar="STR",
        help="domain of the rows: math, science, tooluse, coding, logic, knowledge")
    add("--data", help="short name, hub id or .jsonl file (default: the paper's training set)")
    add("--split", default="train", help="split of the data, where it has several")
    add("--limit", type=int, help="use the first rows only")
    add("--think", action="store_true", help="turn the chat template's thinking on")
    add("--out", required=True, help="folder for the model and its tokenizer")
    add = parser.add_argument_group("optimizer").add_argument
    add("--steps", type=int, help="optimizer steps (default: 100; with --tiny 1400)")
    add("--batch", type=int, help="examples of a step (default: 16; with --tiny 48)")
    add("--lr", type=float, help="peak learning rate of AdamW (default: 2e-5; with --tiny 2e-3)")
    add("--max_tokens", type=int, default=1024, help="longer examples are dropped, and counted")
    add("--tokens_per_micro", type=int, default=4096, help="tokens of a forward and backward pass")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="compute")
    add("--seed", type=int, default=0, help="draws rows and, with --tiny, all that is random")
    tiny = "--tiny" in (sys.argv[1:] if argv is None else argv)
    parser.set_defaults(**dict(steps=1400, batch=48, lr=2e-3) if tiny else
                        dict(steps=100, batch=16, lr=2e-5))
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "lr", "max_tokens", "tokens_per_micro", "limit"):
        if (value := getattr(args, name)) is not None and not value > 0:
            parser.error(f"--{name} {value}: must be positive")
    args.data = args.data or data.TASKS[args.task].TRAIN
    if not (args.data or args.tiny):
        parser.error(f"--task {args.task} has no training set of its own: name one with --data")
    return args


def gold_examples(args, tokenizer):
    """[(token ids, labels)] of the rows: labels are the response and its end, else IGNORED."""
    task, examples = data.TASKS[args.task], []
    rows = task.load(args.data, args.split, args.limit)
    for row in rows:
        prompt = rollout.encode(tokenizer, row["messages"], args.think)
        text = row.get("response") or task.render(row["answer"])
        response = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        if len(prompt) + len(response) <= args.max_tokens:
            examples.append((prompt + response, [IGNORED] * len(prompt) + response))
    print(f"{len(examples)} of {len(rows)} rows fit into --max_tokens {args.max_tokens}")
    return examples or common.fail(f"--data {args.data}: no row fits into {args.max_tokens} tokens")


def micro_batches(examples, budget):
    """Like lengths together, padded on the right: [(ids (B,T), labels (B,T))], B x T <= budget."""
    examples, batches = sorted(examples, key=lambda example: len(example[0])), []
    while examples:
        width = len(examples[-1][0])
        at = -max(1, budget // width)
        rows, examples = examples[at:], examples[:at]
        batches.append([torch.tensor([row[k] + [fill] * (width - len(row[k])) for row in rows])
                        for k, fill in ((0, 0), (1, IGNORED))])
    return batches


def step(model, optimizer, batches):
    """One optimizer step over micro-batches of (ids, labels). Returns the loss, nats a token."""
    total, mean = sum((labels[:, 1:] != IGNORED).sum() for _, labels in batches), 0.0
    for ids, labels in batches:
        ids, labels = ids.to(model.device), labels.to(model.device)
        # logits (B,T,V) are what costs memory: none before the first token that is learnt
        keep = ids.shape[1] - max(1, (labels != IGNORED).any(0).nonzero()[0].item())
        with packing.compute(model):
            logits = model(input_ids=ids, logits_to_keep=keep + 1).logits[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, -keep:].flatten(),
                               ignore_index=IGNORED, reduction="sum") / total
        loss.backward()
        mean += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return mean


def main(args):
    device, rng = ranks.setup(args), random.Random(args.seed)
    if args.tiny:
        rows, tokenizer = tiny_base.prepare()
        model = tiny_base.make_model(tokenizer)
    else:
        model, tokenizer = loading.load_model(args.model)
        examples = gold_examples(args, tokenizer)
    model.compute_dtype = None if args.dtype == "float32" else torch.bfloat16
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for number in (bar := tqdm(range(args.steps), desc="sft")):
        done = number / args.steps
        for group in optimizer.param_groups:  # up for 1/25 of the steps, level to the half, down
            group["lr"] = args.lr * min(1.0, 25 * (done + 1 / args.steps), 2 * (1 - done))
        drawn = (tiny_base.examples(rows, tokenizer, rng, done, args.batch) if args.tiny else
                 rng.sample(examples, min(args.batch, len(examples))))
        loss = step(model, optimizer, micro_batches(drawn, args.tokens_per_micro))
        bar.set_postfix(loss=f"{loss:.3f}")
    model.eval().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {model.num_parameters():,} weights, loss {loss:.3f} at the end")


if __name__ == "__main__":
    main(get_args())
