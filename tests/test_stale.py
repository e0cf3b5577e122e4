"""`m2po stale`: the task, the rules against plain torch, the schedule of the rollouts, and runs that repeat bit for bit."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace

import pytest
import torch
from cli_helpers import PNG, ROOT, invoke, run

from m2po_kernels import reference
from m2po_kernels.cli.stale import arms, command, figures, policy, report, runs, task, train
from m2po_kernels.cli.stale.plan import ARMS, FULL, QUICK, Plan, Run

TINY = Plan(
    width=16,
    layers=1,
    heads=2,
    levels=(1, 2),
    warm_reward=0.25,
    warm_learning_rate=1e-2,
    warm_batch=64,
    updates=8,
    updates_per_step=2,
    prompts_per_update=4,
    group=8,
    learning_rate=3e-3,
    micro_batch=8,
    point_every=4,
    eval_prompts=16,
    staleness=(0, 4),
    seeds=1,
)
FACTS = {
    "m2po_kernels": "0", "torch": "0", "transformers": "0", "backend": "eager", "device": "2 cores", "workers": 2,
    "core_minutes": 1.0, "date": "today", **TINY.values(),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """As the workers do: bits may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A folder with the warm start of TINY's seed."""
    place = tmp_path_factory.mktemp("warm")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runs.warm(TINY, place, 0)
    torch.set_num_threads(threads)
    return place


def model_of(place):
    model = policy.new_model(TINY, 0)
    model.load_state_dict(torch.load(place / "warm-seed0.pt", weights_only=True))
    return model


def test_solutions_earn_the_reward_and_nothing_else_does():
    sums = task.Task((2, 4, 6, 8))
    prompts = sums.prompts(64, policy.generator(0))
    responses, mask = sums.solutions(prompts, 0.0, policy.generator(1))
    assert sums.rewards(prompts, responses).eq(1).all()
    assert (task.valid_tokens(responses) == mask).all()
    assert mask.sum(1).tolist() == [3, 5, 7, 9] * 16
    wrong = torch.where(responses < task.PAD, (responses + 1) % 10, responses)
    endless = torch.where(responses == task.END, 0, responses)
    silent = torch.full_like(responses, task.END)
    for bad in (wrong, endless, silent):
        assert sums.rewards(prompts, bad).eq(0).all()
    # One mistake in each step or none: n steps of right work have the probability 0.8 ** n, and mistakes may cancel.
    prompts = sums.prompts(4096, policy.generator(2))
    noisy = sums.rewards(prompts, sums.solutions(prompts, 0.2, policy.generator(3))[0])
    earned = [float(noisy[level::4].mean()) for level in range(4)]
    assert earned == sorted(earned, reverse=True)
    for value, n in zip(earned, sums.levels, strict=True):
        # 1024 prompts: 5 standard deviations are at most 0.08; 1 / 9 of what is left cancels at most.
        assert 0.8**n - 0.08 < value < 0.8**n + (1 - 0.8**n) / 9 + 0.08


def test_a_worked_prompt():
    sums = task.Task((4, 5))
    prompts = torch.tensor([[3, 8, 5, 1, task.PAD, task.EQUALS]])
    responses, mask = sums.solutions(prompts, 0.0, policy.generator(0))
    assert responses.tolist() == [[3, 1, 6, 7, task.END, task.END, task.END]]
    assert mask.tolist() == [[True] * 5 + [False] * 2]


# Supervised steps of each seed of FULL: what its warm start took where docs/stale.md was measured.
WARM_STEPS = (230, 210, 220, 190, 170)


def test_evaluation_prompts_are_not_held_out():
    """How many of each difficulty also occur in training, as docs/stale.md says; prompts depend on seed and step alone."""
    sums, seen, warm_only = task.Task(FULL.levels), [], []

    def drawn(count, *numbers):
        return [tuple(prompt) for prompt in sums.prompts(count, policy.generator(*numbers)).tolist()]

    for seed, warm_steps in enumerate(WARM_STEPS):
        fixed = drawn(FULL.eval_prompts, seed, 2)
        warm = {prompt for step in range(1, warm_steps + 1) for prompt in drawn(FULL.warm_batch, seed, 1, step)}
        per_step = FULL.prompts_per_update * FULL.updates_per_step
        later = {prompt for step in range(FULL.updates // FULL.updates_per_step) for prompt in drawn(per_step, seed, 4, step)}
        by_level = [fixed[level :: len(FULL.levels)] for level in range(len(FULL.levels))]
        seen.append([sum(prompt in warm | later for prompt in level) for level in by_level])
        warm_only.append(sum(prompt in warm - later for prompt in by_level[1]))
        if seed == 0:
            assert [sum(prompt in warm for prompt in level) for level in by_level] == [64, 42, 1, 0]
    two, four, six, eight = zip(*seen, strict=True)
    assert len(WARM_STEPS) == FULL.seeds
    assert {*two} == {64}
    assert {*eight} == {0}
    assert all(2 * alone > together for alone, together in zip(warm_only, four, strict=True))
    page = " ".join((ROOT / "docs" / "stale.md").read_text().split())
    assert f"all 64 of two digits occur in training as well, of the 64 of four digits {min(four)} to {max(four)} " in page
    assert f"of six digits at most {max(six)}, of eight none" in page
    assert not [name for name in ("docs/stale.md", "README.md") if "held-out" in (ROOT / name).read_text()]
    assert "held-out" not in str(figures.ALL)


@pytest.mark.slow
def test_the_warm_start_takes_as_long_as_the_page_counts():
    assert policy.warm_start(FULL, task.Task(FULL.levels), 0)[1] == WARM_STEPS[0]


def batch_of(seed: int, n: int = 16, length: int = 6) -> arms.Batch:
    random = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(n, length, generator=random) * 3
    proximal = behavior + torch.randn(n, length, generator=random) * 0.2
    log_probs = proximal + torch.randn(n, length, generator=random) * 0.2
    advantages = torch.randn(n, generator=random)
    advantages[::5] = 0  # as in a group whose rewards agree
    mask = torch.arange(length) < torch.randint(1, length + 1, (n, 1), generator=random)
    return arms.Batch(log_probs.requires_grad_(), behavior, proximal, advantages, mask)


def plain(arm: str, batch: arms.Batch, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, kept) of a rule in fp64, written down anew."""
    lp, behavior, proximal, advantages, mask = (t.double() if t.is_floating_point() else t for t in batch)
    a, valid = advantages[:, None].expand_as(lp), mask.sum()

    def clip(ratio, low, high):
        bounded = ratio.clamp(1 - low, 1 + high)
        taken = torch.minimum(ratio * a, bounded * a)
        return taken, ~(((a > 0) & (ratio > 1 + high)) | ((a < 0) & (ratio < 1 - low)))

    ratio, d = (lp - behavior).exp(), (lp - behavior).detach()
    if arm == "grpo":
        taken, kept = clip(ratio, 0.2, 0.2)
        return -(taken * mask).sum() / valid, kept & mask
    if arm == "free":
        return -(ratio * a * mask).sum() / valid, mask
    if arm == "m2po":
        kept = reference.m2po_oracle(*batch[:2], *batch[3:], m2_threshold=0.04).keep
        return -(ratio * a * kept).sum() / valid, kept
    loss, kept = torch.zeros((), dtype=torch.float64), torch.zeros_like(mask)
    for first in range(0, len(lp), micro_batch):
        rows = torch.zeros_like(mask)
        rows[first : first + micro_batch] = True
        rows &= mask
        if arm == "areal":
            step = (batch.proximal_log_probs - batch.behavior_log_probs).square()
            chosen = reference.areal_mask(step, rows, 0.04)
            taken, inside = clip((lp - proximal).exp(), 0.2, 0.2)
            mean = -(taken * (proximal - behavior).exp() * chosen).sum() / chosen.sum()
            loss = loss + mean * rows.sum() / valid
            kept |= chosen & inside
        else:
            region = rows & (a * d > 0)
            v = (batch.log_probs.detach() - batch.behavior_log_probs).square()
            taken, inside = clip(ratio, *reference.repository_clip_bounds(v, region, 0.04))
            loss = loss - (taken * rows).sum() / valid
            kept |= rows & inside
    return loss, kept


@pytest.mark.parametrize("arm", list(ARMS))
@pytest.mark.parametrize("seed", range(4))
def test_each_rule_is_what_it_says(arm, seed):
    batch = batch_of(seed)
    outcome = arms.LOSSES[arm](batch, TINY)
    (gradient,) = torch.autograd.grad(outcome.loss, batch.log_probs)
    loss, kept = plain(arm, batch, TINY.micro_batch)
    (wanted,) = torch.autograd.grad(loss, batch.log_probs)
    assert torch.equal(outcome.kept, kept)
    # Per token: exp, a product, a quotient and, for AReaL, two more of each, each with one rounding or two of fp32.
    assert (gradient - wanted).abs().max() <= 16 * 2.0**-24 * wanted.abs().max()
    # A kept token has a gradient if it has an advantage; a token that is not kept has none. So the share that is reported
    # as dropped or clipped is not the share without gradient.
    pulled = (batch.advantages != 0)[:, None]
    assert torch.equal(gradient != 0, kept & pulled)
    dropped = int((batch.mask & ~kept).sum())
    assert dropped == 0 if arm == "free" else 0 < dropped < int((batch.mask & (gradient == 0)).sum())


@pytest.mark.parametrize("arm", list(ARMS))
def test_a_token_without_advantage_is_dropped_by_areals_mask_alone(arm):
    """It has no gradient under any rule, and counts as dropped where a rule drops it; AReaL's looks at the distance only."""
    batch = batch_of(0)
    batch.proximal_log_probs[0, 0] = batch.behavior_log_probs[0, 0] + 3
    assert batch.advantages[0] == 0
    kept = arms.LOSSES[arm](batch, TINY).kept[0]
    assert torch.equal(batch.mask[0] & ~kept, torch.arange(6) == 0 if arm == "areal" else torch.zeros(6, dtype=torch.bool))


def test_group_advantages():
    found = train.group_advantages(torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1]), 4)
    assert found[4:].eq(0).all()
    assert found[:4].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)


@pytest.mark.parametrize("staleness", [0, 4])
def test_rollouts_are_as_old_as_asked(warmed, monkeypatch, staleness):
    """Those of step s come from the weights of step s - k / updates_per_step, rounded to bf16, or from the initial ones."""
    written: dict[int, str] = {}
    weights: list[str] = []
    collect, update = train._collect, train._update

    def spy_collect(plan, engine, seed, due):
        written[due] = train.fingerprint(engine.model.float())
        engine.model.bfloat16()
        return collect(plan, engine, seed, due)

    def spy_update(model, *args):
        copied = policy.new_model(TINY, 0).bfloat16()
        copied.load_state_dict({name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
        weights.append(train.fingerprint(copied.float()))
        return update(model, *args)

    monkeypatch.setattr(train, "_collect", spy_collect)
    monkeypatch.setattr(train, "_update", spy_update)
    train.train(model_of(warmed), TINY, Run("m2po", staleness, 0))
    lag = staleness // TINY.updates_per_step
    assert len(set(weights)) == TINY.updates
    assert written == {
        step: weights[max(step - lag, 0) * TINY.updates_per_step] for step in range(TINY.updates // TINY.updates_per_step)
    }


def test_behaviour_log_probs_come_from_bf16(warmed):
    model = model_of(warmed)
    engine = policy.Engine(model, task.Task(TINY.levels))
    found = policy.evaluate(TINY, engine, 0)
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    current, _ = policy.response_log_probs(model, found.prompts, found.responses)
    d = (current.detach() - found.log_probs)[found.mask]
    assert 0 < float(d.abs().max()) < 0.5
    again = policy.evaluate(TINY, engine, 0)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_runs_repeat_bit_for_bit_and_go_on_where_they_stopped(tmp_path):
    """Rows, hashes of all final weights among them, for any number of workers, and after an interruption."""
    lines: list[str] = []
    first = runs.run_all(TINY, tmp_path / "a", 1, False, lambda done, total, line: lines.append(line))
    assert len(lines) == 1 + len(TINY.runs())
    rows = [made.row for made in first]
    assert [(row["arm"], row["staleness"]) for row in rows] == [(planned.arm, planned.staleness) for planned in TINY.runs()]
    # Rules differ where there is something to decide.
    assert len({row["weights_sha256"] for row in rows}) > len(ARMS)
    second = runs.run_all(TINY, tmp_path / "b", 2, False, lambda *_: None)
    assert json.dumps([made.row for made in second]) == json.dumps(rows)
    (place,) = (tmp_path / "a").iterdir()
    assert json.loads((place / "setting.json").read_text()) == json.loads(json.dumps({**runs.setting(), **TINY.values()}))
    removed = [place / f"{planned.name}.json" for planned in TINY.runs()[2:4]]
    for path in removed:
        path.unlink()
    (place / f"{TINY.runs()[2].name}.part").write_text('{"row"')  # what a kill leaves in the middle of writing
    lines.clear()
    resumed = runs.run_all(TINY, tmp_path / "a", 1, False, lambda done, total, line: lines.append(line))
    assert [made.row for made in resumed] == rows
    assert len(lines) == len(removed)


@pytest.mark.parametrize("arm", list(ARMS))
def test_the_plan_says_threshold_and_clip(arm):
    """An edited one is another plan, and reaches every rule that has one: nothing beside the plan decides."""
    batch = batch_of(0)
    edited = replace(TINY, m2_threshold=0.004, clip=0.05)
    assert edited.digest() != TINY.digest()
    lost = [int((batch.mask & ~arms.LOSSES[arm](batch, plan).kept).sum()) for plan in (TINY, edited)]
    # (The repository's clip is never tighter than 0.3 and 0.5, which is reached here with either threshold.)
    assert lost[0] == lost[1] if arm in ("free", "repository") else lost[0] < lost[1]
    if arm == "repository":
        assert not torch.equal(arms.LOSSES[arm](batch, replace(TINY, m2_threshold=1.0)).kept, arms.LOSSES[arm](batch, TINY).kept)


def test_runs_of_another_setting_are_not_taken(tmp_path, monkeypatch):
    """Another version, code, processor, torch or backend has another folder, so its results are not returned."""
    assert {"m2po_kernels", "code", "torch", "transformers", "backend", "cpu"} == set(runs.setting())
    place = tmp_path / runs._subfolder(TINY)
    true = runs.setting()
    for name in true:
        monkeypatch.setattr(runs, "setting", lambda name=name: {**true, name: "another"})
        assert tmp_path / runs._subfolder(TINY) != place, name
    monkeypatch.undo()
    assert tmp_path / runs._subfolder(TINY) == place


def test_the_code_of_a_setting(tmp_path):
    """Whatever can change a bit of a run changes the hash; what only shows the runs does not."""
    for name in ("loss.py", "_native.so", "backends/native.py", "reference/variants.py", "cli/demo.py", "linear/walk.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    shutil.copytree(runs.PACKAGE / "cli" / "stale", tmp_path / "cli" / "stale")
    before = runs.code(tmp_path)
    for file in sorted(file for file in tmp_path.rglob("*") if file.suffix in (".py", ".so")):
        name = str(file.relative_to(tmp_path))
        text = file.read_bytes()
        file.write_bytes(text + b"\n")
        shows = name.startswith(("cli/demo", "linear/")) or file.name in runs.SHOWING
        assert (runs.code(tmp_path) == before) is shows, name
        file.write_bytes(text)
    assert runs.code(tmp_path) == before
    assert {file.name for file in (runs.PACKAGE / "cli" / "stale").glob("*.py")} > runs.SHOWING


def test_other_plans_have_other_folders():
    assert TINY.digest() == replace(TINY, seeds=9, staleness=(0,)).digest()
    for name in TINY.values():
        assert replace(TINY, **{name: 77}).digest() != TINY.digest(), name
    assert len({plan.digest() for plan in (TINY, FULL, QUICK)}) == 3
    assert FULL.seeds >= 5
    assert {0, 16, 64, 256} == set(FULL.staleness)
    for plan in (FULL, QUICK):
        assert all(k % plan.updates_per_step == 0 for k in plan.staleness)
        assert plan.updates % plan.point_every == plan.point_every % plan.updates_per_step == 0


def test_a_quick_try_leaves_the_whole_comparison_alone(tmp_path, monkeypatch):
    """Each has a folder of its own where --out names none."""
    monkeypatch.chdir(tmp_path)
    tried = replace(TINY, seeds=1, staleness=(0,))
    monkeypatch.setattr(command, "QUICK", tried)
    monkeypatch.setattr(command, "FULL", replace(tried, learning_rate=1e-3))
    made = {}
    for option in ([], ["--quick"]):
        assert invoke("stale", "--workers", 1, *option).exit_code == 0
        folder = tmp_path / "out" / "stale" / ("quick" if option else "")
        assert (folder / "stale.png").read_bytes().startswith(PNG)
        made[folder] = report.load(folder / "rows.jsonl").facts["plan"]
    assert len(set(made.values())) == 2
    assert all(report.load(folder / "rows.jsonl").facts["plan"] == plan for folder, plan in made.items())


@pytest.mark.slow
def test_quick_takes_under_three_minutes(tmp_path):
    start = time.perf_counter()
    assert run("stale", "--quick", "--out", tmp_path, "--runs", tmp_path / "runs").returncode == 0
    assert time.perf_counter() - start < 180
    assert len(report.load(tmp_path / "rows.jsonl").rows) == len(QUICK.runs())
