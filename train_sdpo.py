"""SDPO and StableSDPO: on-policy self-distillation, the whole algorithm.

The student answers each prompt G times. A response that the verifier accepts is a demonstration for
its siblings: the same model, reading the question WITH a demonstration, is the teacher, and at each
token of its own response the student is pulled towards the teacher's distribution.

    loss = sum_i,t w_t D_beta(p_S(.|x, y_<t) || p_T(.|x, demonstration, y_<t)) / distilled tokens
    D_beta = (1-beta) KL(p_S || M) + beta KL(p_T || M),     M = (1-beta) p_S + beta p_T
    w_t = min(p_S(y_t|x, y_<t) / p_old(y_t|x, y_<t), --is_clip), without gradient

Sum and tokens are over all responses of an optimizer step, on all ranks.
The teacher is frozen (SDPO_0, the default), a moving average of the student (--ema 0.05: SDPO_5%)
or refreshed now and then (--restart_every 10: StableSDPO). Sources: arXiv:2601.20802 (SDPO),
arXiv:2607.01763 (the paper). Left out: reward models, LoRA, off-policy replay.

    python train_sdpo.py --tiny                                   # two CPU cores, minutes
    torchrun --nproc_per_node 8 train_sdpo.py --ema 0.05          # the paper's SDPO_5%, Qwen3-4B
    torchrun --nproc_per_node 8 train_sdpo.py --restart_every 10 --ema 0.05 --restart_mix matched
"""
import time

import torch
from torch.nn.utils.rnn import pad_sequence

import checkpoint
import common
import data
import eval
import loading
import logbook
import losses
import packing
import ranks
import rollout
import teacher as teaching
from data import batches

# ==== the algorithm's own: flags, conditions on them, what a row learns from ====
TINY = dict(lr=1e-4)  # set by --tiny, beside common.TINY


def add_args(parser):
    def mix(text):
        return text if text == "matched" else float(text)
    add, whole = parser.add_argument_group("SDPO").add_argument, common.at_least(0)
    add("--beta", type=float, default=0.5, help="divergence: 0 KL(T||S), 1 KL(S||T), 0.5 JSD")
    add("--topk", type=whole, default=0, help="distil the student's K largest tokens (0: all)")
    add("--tail", action=common.ON_OFF, default=True,
        help="with --topk: what is left as one bucket, or renormalise")
    add("--is_clip", type=float, default=2.0, help="largest importance weight of a token")
    add("--agg", default="token", choices=["token", "seq"], help="mean over tokens or responses")
    add("--success", type=float, default=1.0, help="reward that makes a response a demonstration")
    add("--feedback", default="never", choices=["never", "fallback", "always"],
        help="show the verifier's words (fallback: where there is no demonstration)")
    add("--cot", action="store_true", help="--demo_cot and --loss_cot")
    add("--demo_cot", action="store_true", help="leave the reasoning in the demonstration")
    add("--loss_cot", action="store_true", help="distil the tokens of the reasoning too")
    add("--mask_ratio", type=float, default=0.0, help="share of tokens left out at random")
    add("--max_teacher_prompt", type=int, default=10240, help="longer: its demonstration is cut")
    add = parser.add_argument_group("teacher").add_argument
    add("--ema", type=float, default=0.0, help="update rate a step (0: frozen, 1: the student)")
    add("--restart_every", type=whole, default=0, help="steps between refreshes (0: none)")
    add("--restart_mix", type=mix, default=1.0, help="share of the student; matched: 1-(1-ema)^k")
    add("--teacher_init", metavar="CKPT", help="mix a model or .safetensors into the first teacher")
    add("--teacher_init_mix", type=float, default=1.0, help="share of --teacher_init in it")
    common.add_run_args(parser, lr=1e-5, updates=1)


def check(args, error):
    for name in ("beta", "ema", "mask_ratio", "success", "teacher_init_mix", "restart_mix"):
        value = getattr(args, name)
        if not (value == "matched" or 0 <= value <= 1):
            error(f"--{name} {value}: must lie in [0, 1]")
    if args.cot:
        args.demo_cot = args.loss_cot = True
    if args.group < 2 and args.feedback == "never":
        error("--group 1: demonstrations come from siblings; take 2 or more, or --feedback always")
    if not args.is_clip > 0:
        error(f"--is_clip {args.is_clip}: must be positive")
    if args.mask_ratio == 1:
        error("--mask_ratio 1: leaves no token to learn from")
    if args.restart_mix == "matched":
        if not (args.ema and args.restart_every):
            error("--restart_mix matched: takes its share from --ema and --restart_every")
        args.restart_mix = teaching.matched_mix(args.ema, args.restart_every)
        args.ema = 0.0
    elif args.ema and args.restart_every:
        error("--ema with --restart_every: one teacher or the other, unless --restart_mix matched")
    for flag, usual, other in (("tail", True, "topk"), ("restart_mix", 1, "restart_every"),
                               ("teacher_init_mix", 1, "teacher_init")):
        if getattr(args, flag) != usual and not getattr(args, other):
            error(f"--{flag}: changes nothing without --{other}")
    if args.max_teacher_prompt < args.max_prompt + 64:
        error(f"--max_teacher_prompt {args.max_teacher_prompt}: must be --max_prompt + 64 or more")


def targets(args, task, tokenizer, batch, rollouts, rewards, feedback, step):
    """What each response is distilled from: the teacher's prompts, as token ids, or None for a row
    that is no target; the tokens to distil, (T,) bool; and which of the prompts had to be cut."""
    tags, teacher_prompts, masks, cuts = task.THINK_TAGS, [], [], []
    special = [token for token in tokenizer.all_special_tokens if token not in tags]
    for g, (number, row) in enumerate(batch):
        first, opened, encoded = g * args.group, bool(row["opened"]), {}
        picks = teaching.pick_demonstrations(
            rewards[first:first + args.group], args.group, args.success,
            ranks.keyed_generator("demonstration", args.seed, step, number))
        for i, pick in enumerate(picks, first):  # of row i: which sibling
            demonstration = None if pick is None else teaching.response_for_demo(
                rollouts[first + pick].text, tags, args.demo_cot, opened, special)
            silent = args.feedback == "never" or (args.feedback == "fallback" and demonstration)
            shown = demonstration, None if silent else feedback[i]
            if any(shown) and shown not in encoded:  # siblings may share one
                encoded[shown] = teaching.teacher_prompt_ids(
                    lambda messages: rollout.encode(tokenizer, messages, args.think),
                    row["messages"], *shown, args.max_teacher_prompt)
            (prompt, cut), r = encoded.get(shown, (None, None)), rollouts[i]
            keep = torch.full((len(r.ids),), prompt is not None)
            if not args.loss_cot and (opened or any(tag in r.text for tag in tags)):
                pieces = [tokenizer.decode([token]) for token in r.ids]
                keep &= torch.tensor(teaching.think_mask(pieces, tags, opened))
            drawn = ranks.keyed_generator("mask", args.seed, step, r.row)
            keep &= torch.rand(len(keep), generator=drawn) >= args.mask_ratio
            teacher_prompts.append(prompt)
            masks.append(keep)
            cuts += [] if cut is None else [cut]
    return teacher_prompts, masks, cuts
# ==== end ====


def get_args(argv=None):
    parser = common.Parser(description=__doc__)
    add_args(parser)
    return common.parse(parser, argv, TINY, check)


def main(args, bar=None):
    """One run, in the folder args.out. Returns the last line of its log. bar: continual.py's,
    to advance in place of one of its own."""
    device = ranks.setup(args)
    task = data.TASKS[args.task]
    model, tokenizer = loading.load_model(args.model, ranks.DTYPES[args.param_dtype])
    rows = batches.load_rows(args, task, tokenizer)
    held_out = eval.held_out(args, tokenizer)
    # ==== the algorithm's own: the models beside the student, made of its weights in memory ====
    teacher = teaching.Teacher(model, args.ema, args.restart_every, args.restart_mix)
    reference = teacher if teacher.frozen and not args.teacher_init else None
    if args.ref_every and not reference:
        reference = teaching.Teacher(model)  # ema 0: a frozen copy
    if args.teacher_init:
        weights = loading.load_weights(args.teacher_init, model)
        teaching.mix_weights(teacher.model, weights, args.teacher_init_mix)
    # ==== end ====
    # each once, as they may be one, and in one order on all ranks, since they shard together
    for copy in dict.fromkeys(copy for copy in (teacher, reference) if copy):
        copy.model = ranks.distribute(copy.model, args, device, train=False)
    model = ranks.distribute(model, args, device)
    optimizer = ranks.make_optimizer(model, args)
    state = checkpoint.resume(args, model, optimizer, teacher)
    sampler = rollout.sampler(args, model, tokenizer)
    log = logbook.Log(args, state["step"], bar)
    pack, budget = not args.no_pack, args.tokens_per_micro

    for step in range(state["step"] + 1, args.steps + 1):
        # ---- roll out: G responses of the current student to each prompt, and their rewards ----
        clock, sums = [time.perf_counter()], {name: [0.0, 0] for name in logbook.MEANS}
        batch = batches.batch(rows, step, args)  # this rank's prompts: [(number, row)]
        rollouts = sampler([row["ids"] for _, row in batch], [n for n, _ in batch],
                           args.group, args.max_new, key=(args.seed, step))
        if args.rollout == "vllm":  # which gives no entropies, and rounds in its own way
            logbook.tally(sums, mismatch_kl=rollout.rescore(model, rollouts, budget, pack))
        rewards, feedback = batches.score(task, rollouts, batch, args.group)
        prompts, responses = [r.prompt for r in rollouts], [r.ids for r in rollouts]
        logbook.tally(sums, **logbook.measure(rollouts, rewards, task))
        if args.ref_every and step % args.ref_every == 0:
            base, _ = rollout.logprobs(reference.model, rollouts, budget, pack)
            kl = losses.kl_k3(torch.cat([r.old for r in rollouts]), torch.cat(base))
            logbook.tally(sums, kl_ref=kl)
        clock.append(time.perf_counter())

        # ==== the algorithm's own: which tokens of which rows are learnt from ====
        teacher_prompts, masks, cuts = targets(
            args, task, tokenizer, batch, rollouts, rewards, feedback, step)
        learns = [bool(mask.any()) for mask in masks]  # rows with a gradient
        passes = [prompts, teacher_prompts]  # the prompts of each forward pass
        logbook.tally(sums, frac_distilled=learns, frac_cut=cuts)
        opened = any(row["opened"] for _, row in batch)
        if args.cot and step == 1 and not opened and not sums["frac_think"][0]:
            log.warn(f"--cot: no response of step 1 holds {task.THINK_TAGS[0]}; it changes nothing")
        # ==== end ====

        # ---- learn: `updates` optimizer steps, each one sum over micro-batches and ranks ----
        norms, size = [], len(rollouts) // args.updates
        for first in range(0, len(rollouts), size):
            mini = range(first, first + size)  # numbers of its rows
            weights, share = losses.aggregate_weights(
                pad_sequence([masks[i] for i in mini], batch_first=True), args.agg, torch.float64)
            weights = dict(zip(mini, weights, strict=True))  # row -> (T,)
            learning = [i for i in mini if learns[i]]
            total, learners = ranks.all_sum([share, len(learning)])
            for micro in packing.micro_batches(
                    model, learning, passes, responses, budget, pack):
                row, label, old, sampled, weight, keep = packing.tokens(
                    micro, rollouts, masks, weights, device)  # (n,) each
                hidden = packing.response_hidden(model, micro, prompts, responses, pack)[keep]
                # ==== the algorithm's own: the loss of a token ====
                with torch.no_grad():
                    teacher_hidden = packing.response_hidden(
                        teacher.model, micro, teacher_prompts, responses, pack)[keep]

                def token_loss(logits, at):  # (c, V) of the tokens `at`, (c,) -> (c,)
                    log_s = losses.log_softmax(logits)  # (c, V), of the student
                    with torch.no_grad():
                        log_t = losses.log_softmax(
                            packing.head(teacher.model, teacher_hidden[at]))  # (c, V)
                    ratio = losses.importance_weight(
                        losses.at_labels(log_s, label[at]), sampled[at], args.is_clip)
                    jsd = losses.generalized_jsd(
                        log_s, log_t, args.beta, args.topk, args.tail, normalized=True)
                    logbook.tally(sums, jsd=jsd, is_weight=ratio,
                                  teacher_entropy=losses.entropy(log_t))
                    return ratio * jsd * weight[at]
                # ==== end ====
                loss = packing.head_loss(model, hidden, token_loss) / total
                (loss * ranks.world()).backward()  # as gradients are averaged over ranks
                sums["loss"][0] += loss.item()  # log_line knows of how many steps
            norms.append(ranks.optimizer_step(
                model, optimizer, args, step, learners > 0, sums["loss"][0], batch))
        # ==== the algorithm's own: the teacher follows ====
        teacher.update(model, step)
        # ==== end ====

        # ---- log, evaluate, save ----
        clock.append(time.perf_counter())
        line = logbook.log_line(
            args, step, sums, norms, clock, sum(map(len, responses)), teacher)
        if held_out and step % args.eval_every == 0:
            line["eval"] = held_out(sampler, step)
            state = eval.best(state, line)
        log.write(line, logbook.samples(tokenizer, rollouts, rewards, passes))
        stop = log.asked_to_stop()
        if stop or step in (args.steps, state.get("best_step")) or (
                args.save_every and step % args.save_every == 0):
            checkpoint.save(args, step, model, tokenizer, optimizer, teacher, state)
        if stop:
            log.leave(step)
    return log.close()


if __name__ == "__main__":
    common.run(main, get_args)
