"""What makes N processes one run: ranks, sharding, gradients across ranks, the optimizer's step.

One script serves 1 or N processes. Under torchrun each rank holds 1/N of the prompts of a step;
what makes N processes one run is a forward pass that all ranks take equally often and one average
of the gradients before the optimizer steps. `--fsdp off` keeps whole copies of the model and
averages with one all-reduce a step: DDP without its hooks, so that micro-batches accumulate first
and a rank without a row adds zeros. `--fsdp on` shards weights, gradients and optimizer: FSDP2.
"""
import contextlib
import datetime
import hashlib
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def rank():
    return int(os.environ.get("RANK", 0))


def world():
    return int(os.environ.get("WORLD_SIZE", 1))


def setup(args):
    """Join the other ranks (nccl on CUDA, gloo on CPU). Returns this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                timeout=datetime.timedelta(hours=4))  # ranks sample apart
    torch.manual_seed(args.seed % 2**63)
    if args.tiny:
        torch.set_num_threads(1)  # so small a model only waits for a second thread
    return device


def keyed_generator(*key):
    """A CPU generator that is a function of its key, say ("sample", seed, step, row), and of
    nothing else: the same on any number of ranks, and in a run that was resumed."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def all_sum(values):
    """Sums of a list of numbers over the ranks, in float64."""
    device = "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"
    total = torch.tensor([float(v) for v in values], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


def gather(items):
    """Every rank's list, joined in the order of the ranks, on every rank."""
    parts = [items]
    if dist.is_initialized():
        parts = [None] * world()
        dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def barrier():
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def fills(model, room):
    """Whether --fsdp auto shards: weights, gradients, two moments, teacher and reference would take
    40% of a GPU of `room` bytes; activations and the key-value cache need the rest. In float32,
    which the teacher is in any case: student and teacher are sharded alike or not at all."""
    return 6 * sum(4 * p.numel() for p in model.parameters()) > 0.4 * room


def distribute(model, args, device, train=True):
    """Move a model to its device, say how it computes, and shard it where --fsdp asks for that.

    Sharded on CUDA, a model recomputes its activations.
    """
    compute = DTYPES.get(args.dtype)
    if args.dtype == "auto":
        compute = torch.bfloat16 if device.type == "cuda" else model.dtype
    model.compute_dtype = compute if compute != model.dtype else None  # read by packing.compute
    shard = args.fsdp == "on"
    if args.fsdp == "auto" and world() > 1 and device.type == "cuda":
        shard = fills(model, torch.cuda.get_device_properties(device).total_memory)
    if not shard and model.device.type != device.type:  # FSDP moves the layers, one at a time
        model.to(device)
    if train and (args.checkpoint_activations or (shard and device.type == "cuda")):
        # the older name, up to transformers 5.20, takes what is the newer one's default
        enable = getattr(model, "activation_checkpointing_enable", None)
        enable() if enable else model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # transformers recomputes in train mode alone; there is no dropout
    if shard:
        mesh = dist.device_mesh.init_device_mesh(device.type, (world(),))
        policy = MixedPrecisionPolicy(model.compute_dtype, torch.float32)
        policy = policy if model.compute_dtype else MixedPrecisionPolicy()
        model.compute_dtype = None  # FSDP casts the weights themselves
        lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        for module in (*max(lists, key=len), model):  # layer by layer, then what is left
            fully_shard(module, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(model, "states")
    return model


@contextlib.contextmanager
def gathered(model):
    """Within it a model can sample: an FSDP model is whole on every rank, so that each may call it
    as often as it likes."""
    shards = [m for m in model.modules() if isinstance(m, FSDPModule)]
    training = model.training
    model.eval()  # in train mode, a model that recomputes activations keeps no key-value cache
    for m in shards:
        m.unshard()
        m.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        model.train(training)
        for m in shards:
            m.set_reshard_after_forward(m is not model, recurse=False)
            m.reshard()


def average_gradients(model):
    """The mean of the gradients over the ranks; FSDP has taken it in its backward pass."""
    if world() == 1 or isinstance(model, FSDPModule):
        return
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    for pending in [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]:
        pending.wait()
    for p in model.parameters():
        p.grad /= world()


def make_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.999), fused=True,
                             weight_decay=args.weight_decay)  # fused: one pass over the memory


def optimizer_step(model, optimizer, args, step, gradient, loss, batch):
    """Average, clip, step, clear. Returns the gradient's norm before clipping, or None for a batch
    that had no gradient: no step is made then, since momentum alone would move the weights. A norm
    or a loss (this rank's, of its part of `batch`) that is not finite stops all ranks before it
    reaches the weights."""
    norm = None
    if gradient:
        average_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or float("inf"))
        norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
        if not norm + abs(all_sum([loss])[0]) < float("inf"):
            raise FloatingPointError(
                f"step {step}, rank {rank()}: the loss is {loss} here, the gradient's norm {norm}; "
                "the weights are untouched, so are the checkpoints. The rows of this rank: "
                f"{', '.join(str(row['id']) for _, row in batch)}")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def learning_rate(args, step):
    return args.lr * min(1.0, step / args.warmup if args.warmup else 1.0)
