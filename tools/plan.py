"""Whether a run fits, before it starts: memory of a rank, FLOPs and hours of a step.

Little of it is a formula. Student, teacher and reference are built and sharded, and the largest
micro-batch goes forward and backward, by the trainer's own code, on tensors that have a shape and
no storage; its ranks are a process group that moves nothing. Counted is what is alive at each
moment: weights, casts, what FSDP gathers, activations, a chunk of logits, gradients. Prompts and
responses are as long as the flags allow; shorter ones that fill --tokens_per_micro keep more.

    python train_sdpo.py --plan --ema 0.05 --gpu_gb 80               # one GPU of 80 GB
    WORLD_SIZE=8 python train_grpo.py --plan --gpu_gb 80 --model Qwen/Qwen3-8B --max_new 4096

GB are 2**30 bytes. Formulas: keys and values of --rollout hf; hours, with matmuls at 40% of an
H100's 989 TFLOP/s in bf16 and weights, keys and values read at 60% of its 3.35 TB/s.
"""
import copy
import inspect
import math
import os
import sys
import warnings
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import loading
import losses
import packing
import ranks
import rollout
import teacher as teaching
from tools.bench import flops

GB = 2**30
CONTEXT = 2 * GB  # of a GPU: CUDA, NCCL, cuBLAS, and what the allocator cannot use
MATMULS, READS = 0.4 * 989e12, 0.6 * 3.35e12  # a second
# hidden size, layers, heads, ff, tied, of the config.json of Qwen/Qwen3-*; all have 8 key-value
# heads of 128 and 151,936 tokens (arXiv:2505.09388, table 1; litgpt/config.py)
QWEN3 = {"0.6B": (1024, 28, 16, 3072, True), "1.7B": (2048, 28, 16, 6144, True),
         "4B": (2560, 36, 32, 9728, True), "8B": (4096, 36, 32, 12288, False),
         "14B": (5120, 40, 40, 17408, False), "32B": (5120, 64, 64, 25600, False)}
# what makes a run smaller, the harmless first; the last two change what is computed
SAVINGS = dict(rollout="vllm", fsdp="on", checkpoint_activations=True, tokens_per_micro=4096,
               vllm_memory=0.25, ref_every=0, max_new=2048, param_dtype="bfloat16")


def read_config(name):
    """The config of a published size, a folder, a file or a hub id."""
    if name.startswith("Qwen/Qwen3-") and name[11:] in QWEN3:
        d, layers, heads, ff, tied = QWEN3[name[11:]]
        return Qwen3Config(
            vocab_size=151936, hidden_size=d, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=8, head_dim=128, intermediate_size=ff, tie_word_embeddings=tied)
    path = loading.folder(name)
    gguf = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    try:
        return AutoConfig.from_pretrained(path.parent if gguf else str(path), **gguf)
    except (OSError, ValueError) as error:
        common.fail(f"--model {name}: no config: {str(error).strip().splitlines()[0]}")


class Live(TorchDispatchMode):
    """Bytes of the storages that are alive (`now`), and the most there were (`peak`).

    Not torch's own MemTracker (torch.distributed._tools): it is private, and in torch 2.13 hangs
    hooks on the weights of all that runs, which those of a frozen teacher refuse.
    """

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.sizes = 0, 0, {}  # of storages: {id: bytes}

    def count(self, storage, size):
        if id(storage) not in self.sizes:
            weakref.finalize(storage, self.forget, id(storage))
        self.now += size - self.sizes.get(id(storage), 0)
        self.sizes[id(storage)] = size
        self.peak = max(self.peak, self.now)

    def forget(self, key):
        self.now -= self.sizes.pop(key)

    def __enter__(self):
        self.resize = resize = torch.UntypedStorage.resize_

        def resized(storage, size):  # how FSDP gives up what it gathered
            self.count(storage, size)
            return resize(storage, size)
        torch.UntypedStorage.resize_ = resized
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes again, for the shards
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self.sizes:
                    self.count(storage, storage.nbytes())
        return out


def held(model):
    """Bytes of a model on this rank."""
    tensors = [*model.parameters(), *model.buffers()] if model else []
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


def keys(config, size=2):
    """Bytes of a token's keys and values."""
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * d * size


def memory(args, config, gpu=0):
    """{part: bytes} of a rank out of ranks.world(), and what all weights are in bf16; gpu: bytes of
    its GPU, 0 for a CPU."""
    args, P, G, T = copy.copy(args), args.max_prompt, args.group, args.max_new
    args.dtype = "bfloat16" if gpu and args.dtype == "auto" else args.dtype
    prompts = [[k] + [0] * (P - 1) for k in range(args.prompts // ranks.world()) for _ in range(G)]
    passes, responses = [prompts], [[0] * T] * len(prompts)
    if hasattr(args, "ema"):  # each with a demonstration of its own, cut where it is too long
        longest = min(args.max_teacher_prompt, P + 64 + T)
        passes.append([p + [k] * (longest - P) for k, p in enumerate(prompts)])
    live, fake = Live(), FakeTensorMode(allow_non_fake_inputs=True)
    device, pack = torch.device("cpu"), not args.no_pack
    with fake, live:
        model = AutoModelForCausalLM.from_config(config, dtype=ranks.DTYPES[args.param_dtype])
        model.states = packing._states.__get__(model.eval())
        model.plain_head = model.can_pack = True  # which packing.probe finds out by numbers
        teacher = teaching.Teacher(model).model if hasattr(args, "ema") else None
        moves = teacher is None or args.ema or args.restart_every or args.teacher_init
        own = args.ref_every and moves or getattr(args, "kl_coef", 0)  # else the teacher serves
        reference = teaching.Teacher(model).model if own else None
    micro = packing.micro_batches(model, range(len(prompts) // args.updates), passes, responses,
                                  args.tokens_per_micro, pack)
    if gpu:
        packing.CHUNK = 2**26
        if args.fsdp == "auto" and ranks.world() > 1 and ranks.fills(model, gpu):
            args.fsdp = "on"
        args.checkpoint_activations |= args.fsdp == "on"
    if ranks.world() > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks.world())
    try:
        parts = {"load": live.peak, "bf16": 2 * sum(p.numel() for p in model.parameters())}
        with live:  # not fake, since a mesh of ranks has numbers
            for other in filter(None, (teacher, reference)):
                ranks.distribute(other, args, device, train=False)
            ranks.distribute(model, args, device)
        parts |= dict(weights=held(model), optimizer=2 * held(model), teacher=held(teacher),
                      reference=held(reference), gradients=held(model))
        with fake, live:
            moments = [torch.zeros_like(p) for p in model.parameters() for _ in range(2)]
            parts["sample"] = live.now + args.vllm_memory * gpu
            if args.rollout == "hf":
                with ranks.gathered(model):
                    parts["sample"] = live.now + sampler(args, config, held(model))
            if len(micro) > 1:  # the second one finds the first one's gradients
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
            live.peak = start = live.now
            hidden = packing.response_hidden(model, micro[0], prompts, responses, pack)
            parts["activations"] = live.now - start
            label = torch.zeros(len(hidden), dtype=torch.long)
            other = teacher or (reference if getattr(args, "kl_coef", 0) else None)
            with torch.no_grad():
                taught = other and packing.response_hidden(
                    other, micro[0], passes[-1], responses, pack)

            def token_loss(logits, at):  # as the trainers'
                student = losses.log_softmax(logits)
                with torch.no_grad():
                    told = other and losses.log_softmax(packing.head(other, taught[at]))
                if not teacher:
                    return losses.at_labels(student, label[at])
                jsd = losses.generalized_jsd(student, told, args.beta, args.topk, args.tail, True)
                losses.entropy(told)
                return jsd
            packing.head_loss(model, hidden, token_loss).backward()
            parts["learn"] = live.peak
            del moments
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    most = max(parts["learn"], parts["sample"])
    return parts | {"peak": most + CONTEXT if gpu else max(most, parts["load"])}


def sampler(args, config, weights):
    """Bytes of the sampler of --rollout hf beside whole weights: its cache, logits and casts."""
    low, P, G = args.dtype == "bfloat16", args.max_prompt, args.group
    at_once = inspect.signature(rollout.sample).parameters["tokens_at_once"].default
    n = min(args.prompts // ranks.world(), max(1, at_once // (P + G * args.max_new)))
    room = 32 * 2 ** max(0, math.ceil(math.log2(args.max_new / 32)))  # the buffer doubles
    logits = 32 * n * G * config.vocab_size  # probabilities, and their sums in float64
    casts = weights // 2 if low and args.fsdp != "on" and args.param_dtype == "float32" else 0
    return keys(config, 4 - 2 * low) * n * (P + G * room) + logits + casts


def step(args, config, parts, gpu):
    """({pass: FLOPs of a step, over all ranks}, its hours on GPUs like an H100)."""
    P, G, T = args.max_prompt, args.group, args.max_new
    long = min(args.max_teacher_prompt, P + 64 + T) if hasattr(args, "ema") else 0
    todo = flops(config, [(P, 0, [T] * G)] * args.prompts, [(P, 0, [T] * G)] * args.prompts,
                 [(long, 0, [T])] * args.prompts * G if long else None)
    rows, weights = args.prompts * G / ranks.world(), parts["bf16"]
    cache = max(args.vllm_memory * gpu - weights, GB) / keys(config)  # tokens at once
    read = T * weights * math.ceil(rows * (T + P / G) / cache)  # for each token, all rows at once
    read += rows * T * (P + T / 2) * keys(config)
    matmuls = todo["sampling"] + todo["teacher"] + todo["student"] * 4 / 3  # one forward more
    return todo, (read / READS + matmuls / MATMULS / ranks.world()) / 3600


def cure(args, config, gpu, peak):
    """The flags that make it fit, or None: those of SAVINGS that help, one after another."""
    flags = []
    for name, value in SAVINGS.items():
        now, new = getattr(args, name), copy.copy(args)
        if now == value or (name == "fsdp" and ranks.world() == 1) or (
                type(value) in (int, float) and now < value):
            continue
        setattr(new, name, value)
        less = memory(new, config, gpu)["peak"]
        if less < peak:
            args, peak = new, less
            flags += [f"--{name}" if value is True else f"--{name} {value}"]
        if peak <= gpu:
            return " ".join(flags)


def show(args):
    """Print the plan of a run; gpu_gb: of another GPU than this machine's."""
    warnings.filterwarnings("ignore", "Accessing the data pointer")
    gpu = args.gpu_gb * GB or (torch.cuda.is_available() and torch.cuda.mem_get_info()[1])
    config = read_config(args.model)
    parts = memory(args, config, gpu)
    todo, hours = step(args, config, parts, gpu)
    room = gpu or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    world = ranks.world()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", min(world, 8)))
    print(f"{args.model}, {world} " + (f"x {gpu / GB:.0f} GB" if gpu else "on the CPU"))
    for name in ("weights", "optimizer", "teacher", "reference", "gradients", "activations"):
        print(f"  {name:12}{parts[name] / GB:8.2f} GB a rank")
    print(f"  most in training {parts['learn'] / GB:.2f}, in sampling ({args.rollout}) "
          f"{parts['sample'] / GB:.2f}, in all {parts['peak'] / GB:.2f} GB a rank")
    print(f"  on the host, while loading: {local} x {parts['load'] / GB:.2f} GB")
    print("  a step at full length: " + ", ".join(f"{k} {v / 1e15:.3g}" for k, v in todo.items())
          + " PFLOP" + (f"; {hours:.2f} hours on H100s" if gpu else ""))
    if parts["peak"] * (1 if gpu else local) <= room:
        print("  fits")
    elif gpu:
        flags = cure(args, config, gpu, parts["peak"])
        print("  does not fit" + (f"; it would with {flags}" if flags else
                                  ", with any flag: take more GPUs, or a smaller model"))
    else:
        print(f"  does not fit in {room / GB:.0f} GB of memory")
