"""selective_log_softmax: the worked cases, values and gradients against fp64, layouts, options, and what is never read."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import same_bits
from logits_helpers import assert_matches_oracle, need, run

from m2po_kernels import dispatch, selective_log_softmax
from m2po_kernels.backends import eager_logits
from m2po_kernels.errors import BackendUnavailable, InvalidArgument, InvalidType
from m2po_kernels.logits_args import LogitsArgs

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INF = math.inf


def random_case(shape, *, seed=0, dtype=torch.float32, device="cpu", spread=3.0):
    """Logits, ids, and gradients of which a third are 0."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=g) * spread).to(dtype)
    ids = torch.randint(0, shape[-1], shape[:-1], generator=g)
    grads = [torch.randn(shape[:-1], generator=g) * (torch.rand(shape[:-1], generator=g) < 0.67) for _ in range(2)]
    return logits.to(device), ids.to(device), grads[0].to(device), grads[1].to(device)


# The contract's cases L1 to L4.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_l1_minus_infinity(dtype, device, backend):
    logits = torch.tensor([[0.0, -INF, 0.0]], dtype=dtype, device=device)
    need(backend, logits)
    got = run(logits, torch.tensor([0], device=device), return_entropy=True, backend=backend)
    assert abs(got.log_probs.item() + 0.6931472) < 1e-7
    assert got.entropy is not None
    assert abs(got.entropy.item() - 0.6931472) < 1e-7
    tolerance = 2.0**-22 if dtype != torch.float64 else 1e-15  # exp(-log 2) and expm1(-log 2), 2 ulp each; then exact in 16 bits
    assert bool(((got.grad.double() - torch.tensor([[0.5, 0.0, -0.5]])).abs() <= tolerance).all())
    assert got.grad[0, 1] == 0


def test_l2_equal_logits(device, backend):
    logits = torch.full((1, 5), -50.0, device=device)
    got = run(logits, torch.tensor([3], device=device), backend=backend)
    assert abs(got.log_probs.item() + 1.6094379) < 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_l3_confident_token(dtype, device, backend):
    """p = 1 - 4e-7: loss and gradient survive, as one minus the softmax in fp32 would not."""
    logits = torch.zeros(2, 32000, dtype=dtype, device=device)
    logits[0, 0], logits[1, 0] = 18.0, 25.0
    got = run(logits, torch.zeros(2, dtype=torch.int64, device=device), backend=backend)
    assert abs(got.log_probs[0].item() + 4.872254e-4) < 1e-9
    assert abs(got.log_probs[1].item() / -4.444e-7 - 1) < 1e-3
    slack = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-25 / 4.444e-7}[
        dtype
    ]  # the gradient's own rounding
    assert abs(got.grad[1, 0].item() / 4.444e-7 - 1) < 1e-3 + slack
    assert_matches_oracle(got, logits, torch.zeros(2, dtype=torch.int64))


def test_l4_temperature(device, backend):
    logits = torch.tensor([[2.0, 0.0, 0.0]], device=device)
    ids = torch.tensor([0], device=device)
    assert abs(run(logits, ids, temperature=0.6, backend=backend).log_probs.item() + 0.0689176) < 1e-7
    assert abs(run(logits, ids, backend=backend).log_probs.item() + 0.2395448) < 1e-7
    per_token = torch.tensor([0.6], device=device)
    assert abs(run(logits, ids, temperature=per_token, backend=backend).log_probs.item() + 0.0689176) < 1e-7


# Against fp64.

OPTIONS = [
    {},
    {"temperature": 0.7},
    {"logit_scale": -0.25},
    {"logit_softcap": 5.0, "logit_scale": 1.5, "temperature": 1.3},
    {"vocab_size": -3},
    {"shift": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("columns", [1, 5, 257, 3000])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_random_against_oracle(dtype, columns, options, device, backend):
    logits, ids, g, ge = random_case((2, 4, columns), dtype=dtype, device=device, seed=columns)
    need(backend, logits)
    options = dict(options)
    if "vocab_size" in options:
        options["vocab_size"] = max(1, columns + options["vocab_size"])
        ids = ids.clamp(max=options["vocab_size"] - 1)
    n = 4 - options.get("shift", 0)
    for grad_entropy in (None, ge[:, :n]):
        grads = (g[:, :n], grad_entropy)
        got = run(logits, ids, *grads, **options, return_entropy=True, backend=backend)
        assert_matches_oracle(got, logits, ids, *grads, **options)


@pytest.mark.parametrize(("rows", "columns"), [(3, 49152), (2, 151936)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_vocabulary(dtype, rows, columns, device, backend):
    logits, ids, g, ge = random_case((rows, columns), dtype=dtype, device=device)
    g[0], ge[1] = 0.5, -2.0
    got = run(logits, ids, g, ge, temperature=0.9, backend=backend)
    assert_matches_oracle(got, logits, ids, g, ge, temperature=0.9)


def test_temperature_of_each_token(device, backend):
    logits, ids, g, ge = random_case((3, 5, 300), device=device)
    temperature = torch.linspace(0.3, 2.0, 15, device=device).reshape(5, 3).t()  # strided
    options = {"temperature": temperature, "logit_softcap": 8.0}
    assert_matches_oracle(run(logits, ids, g, ge, **options, backend=backend), logits, ids, g, ge, **options)
    leaf = temperature.clone().requires_grad_()
    assert selective_log_softmax(logits, ids, temperature=leaf, backend=backend).requires_grad is False


@pytest.mark.parametrize("spread", [0.0, 30.0, 1e4, 1e30])
def test_range_of_logits(spread, device, backend):
    """Equal ones; and so far apart that all but a few probabilities are 0."""
    logits, ids, g, ge = random_case((4, 1100), device=device, spread=spread)
    got = run(logits, ids, g, ge, backend=backend)
    if spread < 1e30:
        assert_matches_oracle(got, logits, ids, g, ge)
    assert bool(got.grad.isfinite().all())


def test_tiny_gradients_of_softcapped_logits(device, backend):
    """Deep in saturation tanh is 1 and the slope 0; near 0 the cap does nothing."""
    logits = torch.cat([torch.linspace(-200, 200, 401), torch.logspace(-30, 0, 100)])[None].to(device)
    ids = torch.tensor([420], device=device)
    got = run(logits, ids, logit_softcap=30.0, backend=backend)
    assert_matches_oracle(got, logits, ids, logit_softcap=30.0)


# What is never read, and what is not finite.


def test_rows_without_gradient_are_zero_whatever_they_hold(device, backend):
    logits, ids, g, _ = random_case((2, 6, 1500), device=device)
    g[:, 2] = 1.0
    clean = run(logits, ids, g, backend=backend)
    dirty = logits.clone()
    dirty[g == 0] = math.nan
    leaf = dirty.requires_grad_()
    lp = selective_log_softmax(leaf, ids, backend=backend)
    (grad,) = torch.autograd.grad(lp, leaf, g)
    assert bool(lp[g == 0].isnan().all())
    assert same_bits(grad.cpu(), clean.grad)
    assert bool((grad[g == 0] == 0).all())


def test_padding_is_not_read(device, backend):
    logits, ids, g, ge = random_case((4, 2100), device=device)
    ids = ids % 1999
    want = run(logits[:, :1999].contiguous(), ids, g, ge, backend=backend)
    padded = logits.clone()
    padded[:, 1999:] = math.nan
    got = run(padded, ids, g, ge, vocab_size=1999, backend=backend)
    assert same_bits(got.log_probs, want.log_probs)
    assert same_bits(got.entropy, want.entropy)
    assert same_bits(got.grad[:, :1999], want.grad)
    assert bool((got.grad[:, 1999:] == 0).all())


def test_minus_infinity_and_lowest_logits(device, backend):
    logits, ids, g, ge = random_case((5, 1300), device=device)
    logits[0, ::2] = -INF
    logits[1, :700] = -INF
    logits[2, 1:] = -INF
    logits[3, :] = torch.finfo(torch.float32).min
    logits[4, 700:] = torch.finfo(torch.float32).min
    ids = torch.tensor([1, 900, 0, 5, 20], device=device)
    g = torch.ones_like(g)
    got = run(logits, ids, g, ge, backend=backend)
    assert_matches_oracle(got, logits, ids, g, ge)
    assert bool((got.grad[logits.cpu() == -INF] == 0).all())


def test_rows_that_are_not_finite(device, backend):
    """A NaN or +inf anywhere makes the row's results NaN, and so do -inf everywhere; -inf at the token alone gives -inf."""
    logits, _, _, _ = random_case((5, 1300), device=device)
    logits[0, 1111] = math.nan
    logits[1, 7] = -INF
    logits[2] = -INF
    logits[4, 1234] = INF
    ids = torch.full((5,), 7, device=device)
    lp, entropy = selective_log_softmax(logits, ids, return_entropy=True, backend=backend)
    assert lp.isnan().tolist() == [True, False, True, False, True]
    assert entropy.isnan().tolist() == [True, False, True, False, True]
    assert lp[1].item() == -INF
    assert bool(lp[3].isfinite())
    got = run(logits, ids, torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0], device=device), backend=backend)
    assert bool(got.grad[[0, 4], 100:].isnan().all())
    assert bool((got.grad[1:3] == 0).all())
    assert bool(got.grad[3].isfinite().all())


# One row, any company; one value, any layout.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [5, 257, 2500])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(columns, dtype, device, backend, threads):
    logits, ids, g, ge = random_case((7, 9, columns), dtype=dtype, device=device)
    need(backend, logits)
    g[3, 4] = 1.5
    batch = run(logits, ids, g, ge, temperature=0.8, backend=backend)
    for n_threads in (1, 2):
        threads(n_threads)
        for b, t in ((0, 0), (3, 4), (6, 8)):
            at = slice(b, b + 1), slice(t, t + 1)
            alone = run(logits[at].clone(), ids[at], g[at], ge[at], temperature=0.8, backend=backend)
            assert same_bits(alone.log_probs, batch.log_probs[at])
            assert same_bits(alone.entropy, batch.entropy[at])
            assert same_bits(alone.grad, batch.grad[at])


def test_size_of_eager_chunks_changes_nothing(device, monkeypatch):
    logits, ids, g, ge = random_case((5, 7, 130), device=device)
    want = run(logits, ids, g, ge, backend="eager")
    for rows in (1, 3, 7, 16):
        monkeypatch.setattr(eager_logits, "CHUNK_CPU", rows * 130)
        monkeypatch.setattr(eager_logits, "CHUNK", rows * 130)
        got = run(logits, ids, g, ge, backend="eager")
        for name in ("log_probs", "entropy", "grad"):
            assert same_bits(getattr(got, name), getattr(want, name)), (rows, name)


LAYOUTS = {
    "last row left out": lambda x: x[:, :-1],
    "every other row": lambda x: x[:, ::2],
    "columns of a wider buffer": lambda x: x[..., 3:1003],
    "time first": lambda x: x.transpose(0, 1),
    "one sequence": lambda x: x[0],
    "three leading dimensions": lambda x: x.unflatten(0, (2, 2)),
    "three, the last two mergeable": lambda x: x.unflatten(1, (2, 3)).transpose(0, 1)[:, :1],
    "every third column": lambda x: x[..., ::3],
    "expanded": lambda x: x[:1].expand(3, -1, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype, device, backend):
    """Views are taken as they are, and nothing beside them is written."""
    logits, _, _, _ = random_case((4, 6, 1201), dtype=dtype, device=device)
    view = LAYOUTS[layout](logits)
    need(backend, view)
    g = torch.linspace(-1, 1, view.shape[:-1].numel(), device=device).reshape(view.shape[:-1])
    ids = torch.arange(view.shape[:-1].numel(), device=device, dtype=torch.int32).reshape(view.shape[:-1]) * 7
    want = run(view.contiguous(), ids, g, g * 2, backend=backend)
    got = run(view, ids, g, g * 2, backend=backend)
    assert same_bits(got.log_probs, want.log_probs)
    assert same_bits(got.grad, want.grad)
    if layout == "expanded":
        return
    given, beside = logits.clone(), torch.ones_like(logits, dtype=torch.bool)
    LAYOUTS[layout](beside)[...] = False
    inplace = run(LAYOUTS[layout](given), ids, g, g * 2, inplace=True, backend=backend)
    assert same_bits(inplace.grad, want.grad)
    assert same_bits(LAYOUTS[layout](given).cpu(), want.grad)
    assert same_bits(given[beside], logits[beside])


def test_ids_and_gradients_of_any_strides(device, backend):
    logits, ids, g, ge = random_case((5, 6, 90), device=device)
    want = run(logits, ids, g, ge, backend=backend)
    for name, change in {
        "transposed": lambda t: t.t().contiguous().t(),
        "every other": lambda t: torch.stack([t, t + 1], -1).flatten(1)[:, ::2],
    }.items():
        got = run(logits, change(ids), change(g), change(ge), backend=backend)
        assert same_bits(got.grad, want.grad), name
    one = torch.ones((), device=device).expand(5, 6)
    assert same_bits(run(logits, ids, one, backend=backend).grad, run(logits, ids, one.contiguous(), backend=backend).grad)


def test_shift_is_the_slice(device, backend):
    logits, ids, g, ge = random_case((3, 5, 700), device=device)
    g, ge = g[:, 1:], ge[:, 1:]
    want = run(logits[:, :-1], ids[:, 1:], g, ge, backend=backend)
    ids = ids.clone()
    ids[:, 0] = -100  # the first token of a sequence has no row
    got = run(logits, ids, g, ge, shift=1, backend=backend)
    assert same_bits(got.log_probs, want.log_probs)
    assert same_bits(got.entropy, want.entropy)
    assert same_bits(got.grad[:, :-1], want.grad)
    assert bool((got.grad[:, -1] == 0).all())


@pytest.mark.parametrize("shape", [(0, 4, 10), (3, 0, 10), (0, 10)])
def test_no_rows(shape, device, backend):
    got = run(torch.zeros(shape, device=device), torch.zeros(shape[:-1], dtype=torch.int64, device=device), backend=backend)
    assert got.log_probs.shape == shape[:-1]
    one = torch.zeros(2, 1, 10, device=device)
    got = run(one, torch.zeros(2, 1, dtype=torch.int64, device=device), shift=1, return_entropy=True, backend=backend)
    assert got.log_probs.shape == got.entropy.shape == (2, 0)
    assert bool((got.grad == 0).all())


@pytest.mark.slow
def test_row_stride_beyond_2_31_elements(device, backend):
    """Two rows of bf16 in a buffer of 4.3 GB; what lies between them is NaN."""
    stride, columns = 2**31 + 8, 1000
    buffer = torch.full((stride + columns,), math.nan, dtype=torch.bfloat16, device=device)
    logits = buffer.as_strided((2, columns), (stride, 1))
    small, ids, g, ge = random_case((2, columns), dtype=torch.bfloat16, device=device)
    logits.copy_(small)
    g.fill_(0.75)
    want = run(small, ids, g, ge, backend=backend)
    for inplace in (False, True):
        got = run(logits, ids, g, ge, inplace=inplace, backend=backend)
        assert same_bits(got.log_probs, want.log_probs)
        assert same_bits(got.grad, want.grad)
    assert same_bits(logits.cpu(), want.grad)
    assert bool(buffer[columns : columns + 4096].isnan().all())
    assert bool(buffer[stride - 4096 : stride].isnan().all())


# Who serves what, and errors.


def test_who_declines_what(device, backend):
    """fp64 and columns with a stride are eager's where a backend says so, and all else is served."""
    declined = {"native": {"float64", "columns"}, "triton": {"float64"}, "eager": set()}[backend]
    for name, logits in {
        "float32": torch.zeros(1, 2, 8),
        "bfloat16": torch.zeros(1, 2, 8, dtype=torch.bfloat16),
        "float16": torch.zeros(1, 2, 8, dtype=torch.float16),
        "float64": torch.zeros(1, 2, 8, dtype=torch.float64),
        "columns": torch.zeros(1, 2, 16)[..., ::2],
        "rows": torch.zeros(2, 4, 9)[:, ::2, 1:8],
    }.items():
        logits = logits.to(device)
        call = (logits, LogitsArgs(vocab_size=logits.shape[-1]))
        ids = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=device)
        if name in declined:
            with pytest.raises(BackendUnavailable, match=f"backend='{backend}'"):
                selective_log_softmax(logits, ids, backend=backend)
            assert dispatch.choose(logits.device, None, call) == "eager"
            assert selective_log_softmax(logits, ids).shape == ids.shape
        else:
            assert dispatch.choose(logits.device, backend, call) == backend


def test_errors_name_the_argument():
    x, ids = torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64)
    for error, pattern, args, options in [
        (InvalidType, r"logits must be a float32.*int64", (ids, ids), {}),
        (InvalidType, r"logits must be.*None", (None, ids), {}),
        (InvalidType, r"token_ids must be an int32 or int64.*float32", (x, x[..., 0]), {}),
        (InvalidArgument, r"logits must have shape \[\.\.\., V\]", (x[0, 0], ids[0, 0]), {}),
        (InvalidArgument, r"logits must have shape.*V >= 1", (x[..., :0], ids), {}),
        (InvalidArgument, r"token_ids must have the leading dimensions of logits, \[2, 3\]", (x, ids[:, :2]), {}),
        (InvalidArgument, r"token_ids must be on the device of logits", (x, ids.to("meta")), {}),
        (
            InvalidArgument,
            r"logits of three leading.*view",
            (x.expand(2, 2, 3, 7).transpose(0, 2), ids.expand(2, 2, 3).transpose(0, 2)),
            {},
        ),
        (InvalidArgument, r"token_ids must be in \[0, 7\).*from -1 to 0", (x, ids - torch.eye(2, 3).long()), {}),
        (InvalidArgument, r"token_ids must be in \[0, 5\).*to 6", (x, ids + 6), {"vocab_size": 5}),
        (InvalidArgument, r"temperature must be > 0 and finite; got 0", (x, ids), {"temperature": 0}),
        (InvalidArgument, r"temperature must be > 0 and finite; got nan", (x, ids), {"temperature": math.nan}),
        (InvalidType, r"temperature must be a number", (x, ids), {"temperature": "1"}),
        (InvalidType, r"temperature must be a number or a floating-point", (x, ids), {"temperature": ids}),
        (InvalidArgument, r"temperature must be a number or have.*\[2, 3\]", (x, ids), {"temperature": torch.ones(3)}),
        (InvalidArgument, r"temperature must be > 0 at every token", (x, ids), {"temperature": torch.eye(2, 3)}),
        (InvalidArgument, r"temperature must be > 0 at every token", (x, ids), {"temperature": torch.full((2, 3), math.nan)}),
        (InvalidArgument, r"logit_scale must be finite", (x, ids), {"logit_scale": INF}),
        (InvalidArgument, r"logit_softcap must be > 0 and finite, or None", (x, ids), {"logit_softcap": 0.0}),
        (InvalidArgument, r"logit_softcap must be > 0 and finite, or None", (x, ids), {"logit_softcap": INF}),
        (InvalidArgument, r"vocab_size must be in \[1, 7\]", (x, ids), {"vocab_size": 8}),
        (InvalidArgument, r"vocab_size must be in \[1, 7\]", (x, ids), {"vocab_size": 0}),
        (InvalidType, r"vocab_size must be an integer", (x, ids), {"vocab_size": 7.0}),
        (InvalidArgument, r"shift must be 0 or 1; got 2", (x, ids), {"shift": 2}),
        (InvalidArgument, r"at least one position", (x[:, :0], ids[:, :0]), {"shift": 1}),
        (InvalidArgument, r"entropy_grad=True goes with return_entropy", (x, ids), {"entropy_grad": True}),
        (InvalidArgument, r"inplace=True needs logits of their own memory", (x[:1].expand(2, 3, 7), ids), {"inplace": True}),
        (BackendUnavailable, r"backend must be one of", (x, ids), {"backend": "fast"}),
    ]:
        with pytest.raises(error, match=pattern) as raised:
            selective_log_softmax(*args, **options)
        assert "\n" not in str(raised.value)
