"""GRPO: group relative policy optimisation, the whole algorithm.

The student answers each prompt G times; the verifier gives each answer one reward, and an answer is
made more likely where it beats its siblings, less likely where it falls behind them:

    A_i    = (r_i - mean_j r_j) / (std_j r_j + 1e-6)                      within the group
    loss   = - sum_i,t min(rho_it A_i, clip(rho_it, 1-eps_low, 1+eps_high) A_i) / response tokens
    rho_it = p_S(y_it | x, y_i,<t) / p_old(y_it | x, y_i,<t)

Sum and tokens are over all responses of an optimizer step, on all ranks.
A group whose rewards are all equal says nothing, costs no pass, and still counts in the tokens.
--kl_coef adds a penalty for leaving the base model. Sources: arXiv:2402.03300 (GRPO),
arXiv:2607.01763 (the paper). Left out: critics, reward models, LoRA, off-policy replay.

    python train_grpo.py --tiny                                   # two CPU cores, minutes
    torchrun --nproc_per_node 8 train_grpo.py                     # the paper's GRPO, Qwen3-4B, math
    torchrun --nproc_per_node 8 train_grpo.py --lr 1e-5 --kl_coef 0.001 --task science
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

# ==== the algorithm's own: flags, conditions on them ====
TINY = dict(lr=1e-4)  # set by --tiny, beside common.TINY


def add_args(parser):
    add = parser.add_argument_group("GRPO").add_argument
    add("--no_std", action="store_true", help="advantages without the division by the group's std")
    add("--eps_low", type=float, default=0.2, help="clip the ratio at 1 - eps_low")
    add("--eps_high", type=float, default=0.28, help="clip the ratio at 1 + eps_high")
    add("--kl_coef", type=common.at_least(0, float), default=0.0,
        help="weight of the k3 penalty to the base model")
    add("--tis", type=common.at_least(0, float), default=2.0,
        help="largest weight that corrects for vLLM's rounding as it samples (0: no weights)")
    add("--agg", default="token", choices=["token", "seq"], help="mean over tokens or responses")
    common.add_run_args(parser, lr=1e-6, updates=4)


def check(args, error):
    if args.group < 2:
        error(f"--group {args.group}: an advantage compares siblings; it takes 2 or more")
    if not (0 < args.eps_low <= 1 and args.eps_high > 0) or 0 < args.tis < 1:
        error("--eps_low must lie in (0, 1], --eps_high be positive, --tis be 0 or at least 1")
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
    teacher = None
    reference = teaching.Teacher(model) if args.kl_coef or args.ref_every else None  # ema 0: frozen
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
        advantages = losses.group_advantages(rewards, args.group, std=not args.no_std)  # (N,)
        masks = [torch.ones(len(ids), dtype=torch.bool) for ids in responses]
        learns = [bool(a) or args.kl_coef > 0 for a in advantages]  # rows with a gradient
        passes = [prompts]  # the prompts of each forward pass
        logbook.tally(sums, frac_zero_adv=(advantages.view(-1, args.group) == 0).all(1))
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
                tis = losses.importance_weight(old, sampled, args.tis) if args.tis else 1.0
                advantage = advantages.to(device)[row] * tis  # w min(rho A, ..) = min(rho w A, ..)
                logbook.tally(sums, is_weight=tis)
                if args.kl_coef:
                    with torch.no_grad():
                        base_hidden = packing.response_hidden(
                            reference.model, micro, prompts, responses, pack)[keep]

                def token_loss(logits, at):  # (c, V) of the tokens `at`, (c,) -> (c,)
                    logprobs = losses.token_logprobs(logits, label[at])
                    given = logprobs, old[at], advantage[at], None, args.eps_low, args.eps_high
                    loss = losses.policy_gradient_loss(*given)
                    logbook.tally(sums, clip_frac=losses.clipped_tokens(*given))
                    if args.kl_coef:  # not weighted by rho: exact for the first update of a batch
                        with torch.no_grad():
                            base_logprobs = losses.token_logprobs(
                                packing.head(reference.model, base_hidden[at]), label[at])
                        loss = loss + args.kl_coef * losses.kl_k3(logprobs, base_logprobs)
                    return loss * weight[at]
                # ==== end ====
                loss = packing.head_loss(model, hidden, token_loss) / total
                (loss * ranks.world()).backward()  # as gradients are averaged over ranks
                sums["loss"][0] += loss.item()  # log_line knows of how many steps
            norms.append(ranks.optimizer_step(
                model, optimizer, args, step, learners > 0, sums["loss"][0], batch))
        # ==== the algorithm's own: nothing follows the student ====
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
