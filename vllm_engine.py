"""vLLM as the sampling engine: one inside each rank, given the trainer's weights before each use.

Weights are whole one tensor at a time, under the names of the model's state dict, so that shards of
FSDP2 need no room for a second model. On CUDA the engine sleeps while the trainer trains. It draws
from the same distribution as rollout.sample up to rounding: at T = 1 nothing is cut off, and the
model's generation_config is not read.
"""
import functools
import os
import tempfile
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from common import fail
from ranks import gather, keyed_generator, rank
from rollout import Rollout, decode, stop_ids


@functools.cache  # stages of a sequence and models to compare share it
def start(config, dtype, length, memory, tp, device):
    """An engine in this process, for this rank or tp of them, without weights; asleep on CUDA."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or it could not be given the weights
    for name, value in dict(LOGGING_LEVEL="ERROR", NO_USAGE_STATS="1",
                            CPU_OMP_THREADS_BIND="nobind").items():
        os.environ.setdefault(f"VLLM_{name}", value)
    from vllm import LLM
    room = dict(gpu_memory_utilization=memory, enable_sleep_mode=True) if device == "cuda" else (
        dict(kv_cache_memory_bytes=2**29, enforce_eager=True, enable_chunked_prefill=False))
    launcher = "external_launcher" if "RANK" in os.environ else None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(config)
        try:  # "vllm": its own defaults, not the model's; "processed": after temperature and top_p
            llm = LLM(folder, skip_tokenizer_init=True, load_format="dummy", dtype=dtype,
                      max_model_len=length, generation_config="vllm", tensor_parallel_size=tp,
                      logprobs_mode="processed_logprobs", distributed_executor_backend=launcher,
                      **room)
        except ValueError as error:
            fail(f"--rollout vllm: {' '.join(str(error).split('Value error, ')[-1].split())[:200]}")
    if device == "cuda":
        llm.sleep(level=2)
    return llm


def sample(llm, model, tokenizer, tp, prompts, numbers, group, max_new, key, temperature=1.0,
           top_p=1.0, bar=None):
    """`rollout.sample` by vLLM, with the model's weights of now. A response has a seed of its own,
    keyed as there but spent in vLLM's way; its neighbours change it by rounding alone."""
    from vllm import SamplingParams
    own = numbers
    if tp > 1:  # ranks that share an engine sample together, for all of them
        mates = gather([(prompts, numbers)])[rank() // tp * tp:][:tp]
        prompts, numbers = ([x for mate in mates for x in mate[k]] for k in (0, 1))
    stop, rows = stop_ids(model, tokenizer), [n * group + g for n in numbers for g in range(group)]
    settings = [SamplingParams(
        temperature=temperature, top_p=top_p, max_tokens=max_new, stop_token_ids=stop, logprobs=0,
        seed=keyed_generator("sample", *key, row).initial_seed(), detokenize=False) for row in rows]
    asked = [{"prompt_token_ids": ids} for ids in prompts for _ in range(group)]
    weights, died = _weights(model, llm.model_config.dtype), []
    try:
        outputs = _generate(llm, model.device.type == "cuda", weights, asked, settings, bar)
    except Exception as error:  # of any kind: the engine is lost, and the run with it
        step = "".join(f", step {k}" for k in [k for k in key if isinstance(k, int)][1:])
        died = [f"rank {rank()}{step}: vLLM died: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}"]
        if tp > 1:  # ranks that share the engine may hang in it: torchrun ends them
            raise SystemExit(died[0]) from None
        for _ in weights:  # the other ranks wait for this one's shards
            pass
    if died := gather(died):  # all ranks stop, and one of them says why
        raise SystemExit(f"--rollout vllm: {died[0]}" if rank() == 0 else 1)
    done = []
    for i, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        ids, given = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        given = torch.tensor([at[token].logprob for at, token in zip(given, ids, strict=True)])
        done.append(Rollout(row, prompts[i // group], ids, given, None, ids[-1] in stop,
                            decode(tokenizer, ids, stop)))
    return [r for r in done if r.row // group in own]


def _weights(model, dtype):
    """All names, or vLLM keeps a stale head where it is tied; whole one by one."""
    for name, value in model.state_dict().items():
        value = value.detach().to(dtype)
        yield name, value.full_tensor() if isinstance(value, DTensor) else value


def _generate(llm, cuda, weights, prompts, settings, bar):
    """Wake the engine, push the weights, sample, put it to sleep: outputs in the prompts' order."""
    if cuda:
        torch.cuda.empty_cache()  # what the training step held
        llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    if cuda:
        llm.wake_up(tags=["kv_cache"])
    if not llm.reset_prefix_cache():  # siblings share their prompt in it, steps must not
        raise RuntimeError("it keeps keys and values of the weights before")
    def shown(prompts=None, **_):  # it asks for a bar over the prompts that come in, and over these
        return bar if prompts is None else prompts
    outputs = llm.generate(prompts, settings, use_tqdm=bar is not None and shown)
    if cuda:
        llm.sleep(level=2)  # it has no weights until the next push
    return outputs
