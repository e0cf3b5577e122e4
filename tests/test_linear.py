"""linear_log_probs: log-probs, entropies and every gradient against dense fp64; alignment; what is never read."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import same_bits
from linear_helpers import (
    Case,
    assert_close_as_torch,
    assert_gradients,
    dense_log_probs,
    gradients,
    make_case,
    workspace_for,
)

from m2po_kernels import linear_log_probs, selective_log_softmax
from m2po_kernels.errors import InvalidArgument, InvalidType
from m2po_kernels.linear.plan import chunks
from m2po_kernels.reference import linear_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALINGS = [
    {},
    {"temperature": 0.7, "logit_scale": 1.5},
    {"logit_softcap": 4.0, "vocab_size": 150},
    {"temperature": "per token", "logit_softcap": 9.0, "logit_scale": -0.8},
]


def scaling_of(options: dict, case: Case) -> dict:
    if options.get("temperature") != "per token":
        return options
    return options | {"temperature": torch.linspace(0.5, 1.5, case.token_ids.numel()).reshape(case.token_ids.shape)}


def flow(case: Case, seed: int = 3) -> torch.Tensor:
    """What flows into each log-prob; a third of it 0."""
    g = torch.Generator().manual_seed(seed)
    grad = torch.randn(case.token_ids.shape, generator=g)
    return torch.where(torch.rand(grad.shape, generator=g) < 0.3, 0.0, grad)


def assert_matches(case: Case, scaling: dict, backend: str | None = None, entropy: bool = False, **options) -> None:
    """Results and gradients of one call against fp64."""
    scaling = scaling_of(scaling, case)
    vocab = scaling.get("vocab_size", case.weight.shape[0])
    case = Case(**{**vars(case), "token_ids": case.token_ids % vocab})
    grad, grad_entropy = flow(case), flow(case, 4) if entropy else None
    ours, dense = case.leaves(), case.leaves()
    out = linear_log_probs(
        ours.hidden, ours.weight, ours.token_ids, **ours.head, **scaling, **options,
        return_entropy=entropy, entropy_grad=entropy, backend=backend,
    )  # fmt: skip
    lp, h = out if entropy else (out, None)
    dense_lp, dense_h = dense_log_probs(dense, **scaling)
    want = linear_oracle(
        case.hidden, case.weight, case.token_ids, **case.head, **scaling, grad_log_probs=grad, grad_entropy=grad_entropy
    )
    outputs, dense_outputs = [(lp, grad.to(lp))], [(dense_lp, grad.to(dense_lp))]
    assert_close_as_torch(lp.detach(), dense_lp.detach(), want.log_probs, "log-prob")
    if entropy:
        assert_close_as_torch(h.detach(), dense_h.detach(), want.entropy, "entropy")
        outputs.append((h, grad_entropy.to(h)))
        dense_outputs.append((dense_h, grad_entropy.to(dense_h)))
    assert_gradients(gradients(ours, *outputs), gradients(dense, *dense_outputs), want)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_fp64(dtype, scaling, device, backend):
    if backend != "eager" and dtype == torch.float64:
        pytest.skip("only eager takes fp64 logits; test_dispatch.py covers who declines what")
    case = make_case(dtype=dtype, bias=True, lora=5)
    assert_matches(case, scaling, backend, max_workspace_bytes=workspace_for(7, case))


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_entropy_and_its_gradient(scaling, device, backend):
    case = make_case(bias=True)
    assert_matches(case, scaling, backend, entropy=True, max_workspace_bytes=workspace_for(7, case))


@pytest.mark.parametrize("gather_rows", [True, False])
@pytest.mark.parametrize("lead", [(33,), (3, 11), (2, 3, 5), (0,), (1, 1), (2, 0)], ids=str)
def test_leading_shapes(lead, gather_rows):
    assert_matches(make_case(lead), {}, gather_rows=gather_rows)


@pytest.mark.parametrize(
    ("hidden_dtype", "dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_hidden_and_weight_of_different_types(hidden_dtype, dtype):
    assert_matches(make_case(dtype=dtype, hidden_dtype=hidden_dtype), {})


def test_worked_case_l5(device, backend):
    h = torch.eye(2, device=device, requires_grad=True)
    w = torch.tensor([[1.0, 0], [0, 1], [0, 0]], device=device, requires_grad=True)
    lp = linear_log_probs(h, w, torch.tensor([0, 2], device=device), backend=backend)
    lp.backward(torch.tensor([1.0, -3.0], device=device))
    want_w = torch.tensor([[0.423883, 0.635825], [-0.211942, 1.728351], [-0.211942, -2.364175]])
    want_h = torch.tensor([[0.423883, -0.211942], [0.635825, 1.728351]])
    for got, want in ((w.grad, want_w), (h.grad, want_h)):  # printed to 6 decimals
        assert bool(((got.cpu() - want).abs() <= 5.1e-7).all())


def test_chunks_change_only_the_rounding():
    case = make_case((40,), bias=True)
    for rows in (1, 3, 39, 40, 1000):
        assert_matches(case, {}, max_workspace_bytes=workspace_for(rows, case))
    assert [s.stop - s.start for s in chunks(10, 4)] == [4, 4, 2]
    assert [s.stop - s.start for s in chunks(4096, 896)] == [832, 832, 832, 832, 768]  # multiples of 64, as full tiles want
    assert chunks(0, 4) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_d_weight_is_summed_in_fp32(dtype):
    """256 + 1 + ... in bf16 stays 256: the ulp there is 2. Each row of d weight here gets 1 or 256 from each of many chunks."""
    n, vocab = 65, 2
    hidden = torch.ones(n, 1, dtype=dtype)
    hidden[0] = 256
    weight = torch.zeros(vocab, 1, dtype=dtype, requires_grad=True)
    ids = torch.zeros(n, dtype=torch.int64)
    grad = torch.full((n,), 2.0)  # p = 1/2: d logits are +1 and -1
    lp = linear_log_probs(hidden, weight, ids, max_workspace_bytes=(vocab + 2) * dtype.itemsize)
    lp.backward(grad)
    assert weight.grad.tolist() == [[320.0], [-320.0]]
    control = torch.tensor(256.0, dtype=torch.bfloat16)
    for _ in range(64):
        control += 1
    assert float(control) == 256


@pytest.mark.parametrize("make", ["expanded", "strided", "transposed"])
def test_upstream_gradients_of_any_stride(make):
    case = make_case((4, 6)).leaves()
    lp = linear_log_probs(case.hidden, case.weight, case.token_ids)
    grad = {
        "expanded": torch.tensor(1.5).expand(4, 6),
        "strided": torch.randn(4, 12)[:, ::2],
        "transposed": torch.randn(6, 4).T,
    }[make]
    got = gradients(case, (lp, grad))
    want = gradients(case, (linear_log_probs(case.hidden, case.weight, case.token_ids), grad.contiguous()))
    assert all(same_bits(got[name], want[name]) for name in got)
    assert bool((got["hidden"] != 0).any())


def test_only_what_requires_a_gradient_gets_one():
    full = make_case(bias=True, lora=3).leaves()
    want = gradients(full, (linear_log_probs(full.hidden, full.weight, full.token_ids, **full.head), flow(full)))
    for name in want:
        case = make_case(bias=True, lora=3)
        case = Case(**{**vars(case), name: getattr(case, name).requires_grad_()})
        got = gradients(case, (linear_log_probs(case.hidden, case.weight, case.token_ids, **case.head), flow(case)))
        assert list(got) == [name]
        assert same_bits(got[name], want[name])


def test_tied_head_sums_both_uses():
    """The embedding is the head: its gradient is that of the lookup and that of the head."""
    case = make_case((12,))
    inputs = torch.arange(12) % 7

    def grad_of(way) -> torch.Tensor:
        table = case.weight.clone().requires_grad_()
        way(torch.nn.functional.embedding(inputs, table).tanh(), table).sum().backward()
        return table.grad

    ours = grad_of(lambda h, w: linear_log_probs(h, w, case.token_ids))
    dense = grad_of(lambda h, w: (h @ w.T).log_softmax(-1).gather(-1, case.token_ids[:, None]))
    wide = case.weight.double().requires_grad_()
    h = torch.nn.functional.embedding(inputs, wide).tanh()
    (h @ wide.T).log_softmax(-1).gather(-1, case.token_ids[:, None]).sum().backward()
    assert_close_as_torch(ours, dense, wide.grad, "d table")


@pytest.mark.parametrize("gather_rows", [True, False])
def test_masked_rows_are_never_read(gather_rows, device, backend):
    case = make_case((30,), bias=True)
    temperature = torch.full((30,), 0.8)
    mask = torch.arange(30) % 3 != 0
    options = {"mask": mask, "gather_rows": gather_rows, "backend": backend, "max_workspace_bytes": workspace_for(8, case)}

    def call(hidden, ids, temperature, grad):
        h, w = hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
        lp = linear_log_probs(h, w, ids, bias=case.bias, temperature=temperature, **options)
        return lp, *torch.autograd.grad(lp, [h, w], grad)

    grad = flow(case)
    want = call(case.hidden, case.token_ids, temperature, grad)
    dirty = [
        torch.where(mask[:, None], case.hidden, math.nan),
        torch.where(mask, case.token_ids, -100),
        torch.where(mask, temperature, 0.0),
        torch.where(mask, grad, math.nan),
    ]
    got = call(*dirty)
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(got, want, strict=True))
    assert bool((got[0][~mask] == 0).all())
    assert bool((got[1][~mask] == 0).all())
    assert bool((got[1][mask & (grad != 0)] != 0).any())


def test_padding_of_the_vocabulary_does_not_exist():
    """Whatever its rows hold; and it is not multiplied, so that the results have the bits of a head without it."""
    case = make_case((9,), vocab=20, bias=True, lora=2)

    def call(pad: int):
        padded = Case(
            case.hidden,
            *(case.weight, case.token_ids, case.bias, case.lora_a, case.lora_b),
        ).leaves()
        rows = {n: torch.full((pad, *getattr(case, n).shape[1:]), math.nan) for n in ("weight", "bias", "lora_b")}
        tall = {n: torch.cat([getattr(padded, n), extra]) for n, extra in rows.items()}
        lp = linear_log_probs(
            padded.hidden, tall["weight"], case.token_ids, bias=tall["bias"], lora_a=padded.lora_a, lora_b=tall["lora_b"],
            vocab_size=20,
        )  # fmt: skip
        return {"lp": lp.detach(), **gradients(padded, (lp, flow(case)))}

    want, got = call(0), call(4)
    assert all(same_bits(got[name], want[name]) for name in want)


# Alignment, as trainers have it.


def test_alignment_of_trl_and_verl_padded_batches():
    """A whole padded batch of prompts (left-padded) and completions: logits[:, -K - 1 : -1] go with input_ids[:, -K:]."""
    batch, length, k, vocab = 3, 14, 6, 50
    case = make_case((batch, length), vocab=vocab)
    input_ids = case.token_ids
    logits = case.hidden @ case.weight.T
    # TRL 1.x, GRPOTrainer._get_per_token_logps_and_entropies: logits_to_keep + 1 asked for, the last dropped, the last K kept.
    trl_logits = logits[:, -(k + 1) :][:, :-1][:, -k:]
    trl_ids = input_ids[:, -k:]
    # verl, dp_actor: logits[:, -response_length - 1 : -1] with responses = input_ids[:, -response_length:].
    assert torch.equal(trl_logits, logits[:, -k - 1 : -1])
    want = trl_logits.log_softmax(-1).gather(-1, trl_ids[..., None])[..., 0]
    for ids in (input_ids, trl_ids):
        got = linear_log_probs(case.hidden, case.weight, ids, shift=1, logits_to_keep=k)
        assert got.shape == (batch, k)
        assert bool(((got - want).abs() < 1e-5).all())
    off_by_one = linear_log_probs(case.hidden[:, -k:], case.weight, trl_ids)
    assert bool(((off_by_one - want).abs() > 0.1).any())

    whole = linear_log_probs(case.hidden, case.weight, input_ids, shift=1)
    assert whole.shape == (batch, length - 1)
    assert bool(((whole[:, -k:] - want).abs() < 1e-5).all())
    as_logits = selective_log_softmax(logits, input_ids, shift=1)
    assert bool(((whole - as_logits).abs() < 1e-5).all())


def test_gradients_of_a_sliced_batch_are_those_of_the_slice():
    case = make_case((3, 14)).leaves()
    lp = linear_log_probs(case.hidden, case.weight, case.token_ids, shift=1, logits_to_keep=6)
    grad = torch.randn(3, 6)
    got = gradients(case, (lp, grad))
    sliced = linear_log_probs(case.hidden[:, 7:13], case.weight, case.token_ids[:, 8:])
    want = gradients(case, (sliced, grad))
    assert all(same_bits(got[name], want[name]) for name in got)
    assert bool((got["hidden"][:, :7] == 0).all())
    assert bool((got["hidden"][:, 13:] == 0).all())


def test_alignment_of_packed_sequences():
    """verl without padding: token_ids = input_ids.roll(-1); each sequence's last position has no token of its own."""
    lengths = [4, 1, 6]
    case = make_case((sum(lengths),))
    rolled = case.token_ids.roll(-1)
    ends = torch.tensor(lengths).cumsum(0) - 1
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    mask[ends] = False
    packed = linear_log_probs(case.hidden, case.weight, rolled, mask=mask)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        own = linear_log_probs(case.hidden[None, part], case.weight, case.token_ids[None, part], shift=1)
        assert bool(((packed[part][: length - 1] - own[0]).abs() < 1e-5).all())
        start += length


# Autocast.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_followed_as_by_linear(dtype):
    case = make_case((20,), bias=True).leaves()
    with torch.autocast("cpu", dtype=dtype):
        lp = linear_log_probs(case.hidden, case.weight, case.token_ids, **case.head)
        logits = torch.nn.functional.linear(case.hidden, case.weight, case.bias)
    assert logits.dtype == dtype
    want = selective_log_softmax(logits, case.token_ids)
    assert lp.dtype == torch.float32
    assert same_bits(lp.detach(), want.detach())
    grad = flow(case)
    got, dense = gradients(case, (lp, grad)), gradients(case, (want, grad))
    exact = linear_oracle(case.hidden, case.weight, case.token_ids, bias=case.bias, grad_log_probs=grad)
    assert {g.dtype for g in got.values()} == {torch.float32}
    for name in got:
        assert_close_as_torch(got[name], dense[name], getattr(exact, name), name, exact.log_probs)


# Errors.


class _LooksLikeDTensor(torch.Tensor):
    def full_tensor(self) -> torch.Tensor:
        return self


def test_sharded_weights_are_refused():
    case = make_case((5,))
    with pytest.raises(InvalidArgument, match=r"weight is a DTensor.*full_tensor"):
        linear_log_probs(case.hidden, case.weight.as_subclass(_LooksLikeDTensor), case.token_ids)
    empty = torch.nn.Parameter(torch.empty(0))
    empty.ds_id = 3
    with pytest.raises(InvalidArgument, match=r"weight is empty because ZeRO-3.*GatheredParameters"):
        linear_log_probs(case.hidden, empty, case.token_ids)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(4)}, InvalidArgument, "hidden must have shape"),
        ({"hidden": torch.zeros(4, 24, dtype=torch.int32)}, InvalidType, "hidden must be float32"),
        ({"weight": torch.zeros(7, 23)}, InvalidArgument, r"weight must have shape \[V, 24\]"),
        ({"weight": torch.zeros(0, 24)}, InvalidArgument, "weight must have a row per token"),
        ({"weight": [1.0]}, InvalidType, "weight must be a torch.Tensor"),
        ({"token_ids": torch.zeros(4)}, InvalidType, "token_ids must be an int32 or int64"),
        ({"token_ids": torch.zeros(3, dtype=torch.int64)}, InvalidArgument, r"token_ids must have shape \[4\]"),
        ({"token_ids": torch.full((4,), 7)}, InvalidArgument, r"token_ids must be in \[0, 7\)"),
        ({"bias": torch.zeros(6)}, InvalidArgument, r"bias must have shape \[7\]"),
        ({"lora_a": torch.zeros(2, 24)}, InvalidArgument, "lora_a and lora_b go together"),
        ({"lora_a": torch.zeros(2, 23), "lora_b": torch.zeros(7, 2)}, InvalidArgument, "lora_a must have shape"),
        ({"lora_a": torch.zeros(2, 24), "lora_b": torch.zeros(7, 3)}, InvalidArgument, r"lora_b must have shape \[7, 2\]"),
        ({"lora_scale": "1"}, InvalidType, "lora_scale must be a number"),
        ({"mask": torch.ones(3)}, InvalidArgument, r"mask must have the result's shape, \[4\]"),
        ({"shift": 2}, InvalidArgument, "shift must be 0 or 1"),
        ({"logits_to_keep": 5}, InvalidArgument, r"logits_to_keep must be in \[0, 4\]"),
        ({"logits_to_keep": 1.0}, InvalidType, "logits_to_keep must be an integer"),
        ({"temperature": 0.0}, InvalidArgument, "temperature must be > 0"),
        ({"temperature": torch.ones(3)}, InvalidArgument, "temperature must be a number or have the result's shape"),
        ({"logit_softcap": -1.0}, InvalidArgument, "logit_softcap must be > 0"),
        ({"vocab_size": 8}, InvalidArgument, r"vocab_size must be in \[1, 7\]"),
        ({"vocab_size": 7.0}, InvalidType, "vocab_size must be an integer"),
        ({"vocab_start": 3}, InvalidArgument, "vocab_start goes with tp_group"),
        ({"reduce_hidden": True}, InvalidArgument, "reduce_hidden=True goes with tp_group"),
        ({"tp_group": 1, "vocab_size": 7}, InvalidType, "tp_group must be a torch.distributed.ProcessGroup"),
        ({"tp_group": SimpleNamespace(group_name="0")}, InvalidArgument, "vocab_size is None with tp_group"),
        ({"tp_group": SimpleNamespace(group_name="0"), "vocab_size": 7}, InvalidArgument, "vocab_start is None with tp_group"),
        ({"max_workspace_bytes": 100}, InvalidArgument, "max_workspace_bytes must hold one row"),
        ({"max_workspace_bytes": 1e9}, InvalidType, "max_workspace_bytes must be an integer"),
        ({"entropy_grad": True}, InvalidArgument, "entropy_grad=True goes with return_entropy"),
        ({"backend": "cuda9"}, InvalidArgument, "backend must be one of"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_errors_name_the_argument(change, error, message):
    call = {"hidden": torch.zeros(4, 24), "weight": torch.zeros(7, 24), "token_ids": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        linear_log_probs(**{**call, **change})
