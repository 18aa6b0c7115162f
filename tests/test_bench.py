"""bench.py's arithmetic, a smoke run, and that what makes sampling and packing fast is exact."""
import json
import types

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import losses
import packing
import rollout
from tools import bench, bench_workers

SHAPE = dict(vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=8)
MODELS = {"llama": (LlamaForCausalLM, LlamaConfig, SHAPE),
          "qwen2": (Qwen2ForCausalLM, Qwen2Config, {k: SHAPE[k] for k in SHAPE if k != "head_dim"}),
          "qwen3": (Qwen3ForCausalLM, Qwen3Config, SHAPE),
          "gpt2": (GPT2LMHeadModel, GPT2Config,
                   dict(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=256))}
TOKENIZER = types.SimpleNamespace(eos_token_id=0, name_or_path="none", decode=str)


def net(name="llama", dtype=torch.float64):
    torch.manual_seed(0)
    kind, config, shape = MODELS[name]
    model = kind(config(**shape, bos_token_id=0, eos_token_id=0)).to(dtype).eval()
    for weight in model.parameters():
        weight.data *= 4  # so that it prefers some tokens, and attends here rather than there
    packing.probe(model)
    return model


def test_flops_are_those_that_torch_counts():
    model = net(dtype=torch.float32)
    prompts, responses = [[1] * 7] * 3 + [[2] * 5] * 2, [[3] * n for n in (4, 2, 6, 1, 9)]
    with FlopCounterMode(display=False) as counter:
        hidden = packing.response_hidden(model, range(3), prompts, responses)
        packing.head_loss(model, hidden, lambda logits, at: logits.logsumexp(-1)).backward()
    counts = counter.get_flop_counts()["Global"]
    linear = sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    linear += 2 * 32 * 48 * 12  # the head's weight gradient: torch does not count addmm_
    mask = packing.layout(prompts[:3], responses[:3], pack=True)[2]
    packed = bench_workers.siblings(range(5), prompts, responses)
    assert packed == [(7, 0, [4, 2, 6]), (5, 0, [1, 9])]
    found = bench.flops(model.config, packed, packed[:1], packed[1:])
    pairs = 4 * 2 * 4 * 8 * int(mask.sum())  # 4 FLOPs x layers x heads x head size
    assert found["student"] == linear + 3 * pairs
    assert found["sampling"] == found["student"] / 3 + found["teacher"]
    prompts = [[1] * 7, [1] * 6 + [4, 5]]
    mask = packing.layout(prompts, [[3, 3], [3]], pack=True)[2]
    tree = bench_workers.siblings(range(2), prompts, [[3, 3], [3]])
    assert tree == [(7, 0, [2]), (8, 6, [1])]
    each = (linear - 3 * 2 * 32 * 48 * 12) // (7 + 3 + 1 + 5)  # of a token, but for the head
    wanted = each * mask.shape[-1] + 3 * 2 * 32 * 48 * 3 + 3 * 4 * 2 * 4 * 8 * int(mask.sum())
    assert bench.flops(model.config, tree, tree)["student"] == wanted


def test_slope():
    assert bench.slope([2, 8, 32], [3 * x**1.5 for x in (2, 8, 32)]) == pytest.approx(1.5)


def test_ratios():
    def step(seconds, gb):
        return {"seconds": seconds, "cpu": 2 * seconds, "tokens": 12, "peak_gb": gb,
                "phases": {"sampling": seconds / 2}, "flops": {"student": 6e9}}
    took = {"ours": [step(2, 1), step(9, 2), step(3, 1)], "trl": [step(6, 8)] * 3}
    out = bench.summary(took, rate=4e9)
    assert out["ratio"] == {"seconds": 0.5, "cpu": 0.5, "peak_gb": 0.25}  # medians, largest peak
    assert out["ours"]["floor_s"] == 1.5 and out["ours"]["seconds_of_floor"] == 2
    assert out["ours"]["tokens_per_s"] == 4 and out["ours"]["phases"] == {"sampling": 1.5}


def test_smoke(tmp_path, capsys):
    bench.main(["sdpo", "--vocab", "64", "--case", "words", "--words", "9", "--prompts", "1",
                "--group", "2", "--max_new", "5", "--steps", "1", "--warm", "0",
                "--out", str(tmp_path / "bench.json")])
    (line,) = json.loads((tmp_path / "bench.json").read_text())
    (step,) = line["steps"]["ours"]
    assert line["command"][:2] == ["tools/bench.py", "sdpo"] and line["args"]["words"] == 9
    assert line["versions"]["torch"] == torch.__version__ and line["commit"] and line["date"]
    assert step["tokens"] == 2 * 5  # nothing ends early
    assert set(step["phases"]) == {
        "sampling", "teacher", "forward", "head", "backward", "optimizer"}
    assert 0 < step["phases"]["sampling"] < step["seconds"] and 0.1 < step["peak_gb"] < 4
    assert json.loads(capsys.readouterr().out)["ours"]["tokens"] == 10


@pytest.mark.parametrize("name", MODELS)
def test_shared_prompts_are_exact(name):
    """One copy of a prompt for all siblings, or one each: the same samples, as rows and then whole
    groups finish. EOS is made likely enough for that."""
    model, prompts = net(name), [[5, 6, 7], [9] * 12, [1, 2], [3, 8, 4, 7, 6]]
    stop = [0, 1, 2, 3]
    uniforms = torch.rand(12, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen, attend = [], rollout.SharedPrompts.attend

    def spy(self, layer, query, *rest):
        seen.append((len(self.padding), len(query)))
        return attend(self, layer, query, *rest)
    rollout.SharedPrompts.attend = spy
    try:
        one = rollout._sample_batch(model, prompts, uniforms, stop, 1.0, 1.0)
        prompts_left, rows_left = zip(*seen, strict=True)
        assert prompts_left[0] == 4 > prompts_left[-1] and len(set(rows_left)) > 3
        seen.clear()
        model.can_pack = False
        each = rollout._sample_batch(model, prompts, uniforms, stop, 1.0, 1.0)
        assert not seen
    finally:
        rollout.SharedPrompts.attend = attend
    assert torch.equal(one[0], each[0]) and torch.equal(one[3], each[3])
    for x, y in zip(one[1:3], each[1:3], strict=True):  # transformers' norms are float32
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    assert model.config._attn_implementation == "sdpa"


def test_growing_cache_holds_what_it_was_given():
    draw = torch.Generator().manual_seed(0)
    cache, kept = rollout.Growing(), torch.zeros(6, 2, 0, 3)
    for t in range(70):  # past two doublings
        new = torch.rand(len(kept), 2, 1, 3, generator=draw)
        keys, values = cache.update(new, -new)
        kept = torch.cat([kept, new], 2)
        assert torch.equal(keys, kept) and torch.equal(values, -kept)
        if t in (0, 31, 40):
            going = torch.tensor([i for i in range(len(kept)) if i != 1])
            cache.batch_select_indices(going)
            kept = kept[going]
    assert cache.get_seq_length() == 70 and len(kept) == 3


def test_strangers_in_a_row_do_not_see_each_other():
    model = net()
    prompts = [[5] * 20] * 4 + [[7] * 3] * 2 + [[8] * 4] + [[9, 1]] * 3
    responses = [[i + 1, *range(1, 2 + i % 5)] for i in range(10)]
    rows = [3, 0, 9, 4, 6, 1, 2, 5, 8, 7]
    ids = packing.layout([prompts[i] for i in rows], [responses[i] for i in rows], pack=True)[0]
    assert len(ids) == 2 < 4  # of four prompts, three fit into one row
    gradients = []
    for pack in (True, False):
        model.zero_grad()
        hidden = packing.response_hidden(model, rows, prompts, responses, pack)
        (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
         ).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()
                                    if p.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-6 * gradients[1].norm()  # float32 norms
    assert gradients[1].norm() > 1


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("topk", [0, 3])
def test_normalised_inputs_change_no_divergence(beta, topk):
    torch.manual_seed(0)
    s, t = torch.randn(5, 9, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
    t[0, 4] = -torch.inf if beta < 1 else 0.0  # at beta 1 it is an infinite divergence
    logits, normal = s.clone().requires_grad_(), s.clone().requires_grad_()
    one = losses.generalized_jsd(logits, t, beta, topk)
    two = losses.generalized_jsd(losses.log_softmax(normal), losses.log_softmax(t), beta, topk,
                                 normalized=True)
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
    (a,), (b,) = (torch.autograd.grad(x.sum(), y) for x, y in ((one, logits), (two, normal)))
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_entropy_of_impossible_tokens():
    log_p = torch.tensor([[0.0, -torch.inf], [0.5, 0.5], [torch.nan, 0.0]])
    log_p[1] = log_p[1].log()
    found = losses.entropy(log_p)
    assert found[0] == 0 and found[1] == pytest.approx(0.6931472) and found[2].isnan()
