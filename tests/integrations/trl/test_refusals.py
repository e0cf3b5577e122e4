"""What M2POConfig and M2POTrainer refuse, each with the option to set; and what they rest on in TRL but cannot run here."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator, ParallelismConfig
from peft import LoraConfig
from tiny import Recorded, config
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.scripts.utils import TrlParser

from m2po_kernels.errors import InvalidArgument, InvalidType, MissingBehaviorLogProbs
from m2po_kernels.integrations import common
from m2po_kernels.integrations.trl import M2POConfig, M2POTrainer
from m2po_kernels.integrations.trl_config import check_logprobs_mode


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_importance_sampling_correction": True}, r"vllm_importance_sampling_correction must be False: .*got True"),
        ({"loss_type": "grpo"}, r"loss_type must be 'dapo': .*got 'grpo'"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level must be 'token'"),
        ({"epsilon": 0.1}, r"epsilon must be 0\.2: .*leave it out; got 0\.1"),
        ({"epsilon_high": 0.28}, "epsilon_high must be None"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold must be None"),
        ({"top_entropy_quantile": 0.2}, r"top_entropy_quantile must be 1\.0"),
        ({"entropy_coef": 0.01}, r"entropy_coef must be 0\.0"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy must be False"),
        ({"use_bias_correction_kl": True}, "use_bias_correction_kl must be False"),
        ({"delta": 1.0}, r"delta must be > 1, .*got 1\.0"),
        ({"m2_threshold": -1.0}, "m2_threshold must be >= 0"),
        ({"scope": "some"}, "scope must be"),
        ({"top_p": 0.9}, r"top_p must be 1\.0: .*log-probs know of temperature alone; got 0\.9"),
        ({"top_k": 50}, "top_k must be 0: .*got 50"),
        ({"min_p": 0.1}, r"min_p must be None: .*got 0\.1"),
        ({"repetition_penalty": 1.1}, r"repetition_penalty must be 1\.0: .*got 1\.1"),
        ({"vllm_structured_outputs_regex": "a*"}, "vllm_structured_outputs_regex must be None"),
        ({"generation_kwargs": {"top_p": 0.9}}, r"generation_kwargs may set seed, .*got top_p=0\.9"),
        ({"generation_kwargs": {"seed": 1, "frequency_penalty": 0.5}}, r"generation_kwargs may set .*got frequency_penalty=0\.5"),
        ({"generation_kwargs": {"temperature": 0.7}, "temperature": 1.0}, r"generation_kwargs .*got temperature=0\.7"),
        ({"generation_kwargs": {"logprobs": 5}}, r"generation_kwargs .*got logprobs=5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_without_a_place_are_refused(options, message, out):
    with pytest.raises(InvalidArgument, match=message):
        config(out, **options)


def test_a_sampler_that_is_off_may_be_said_to_be(out):
    harmless = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "temperature": 0.7, "seed": 3, "stop": ["\n"]}
    config(out, top_k=-1, min_p=0.0, temperature=0.7, generation_kwargs=harmless)


@pytest.mark.parametrize("layout", [(2, 8, 4, 1), (4, 2, 3, 1), (4, 2, 1, 3)], ids=str)
def test_windows_that_need_a_generation_to_come_are_refused(layout, out):
    with pytest.raises(InvalidArgument, match=r"gradient_accumulation_steps must divide steps_per_generation \* num_iterations"):
        config(out, layout)


def test_such_a_window_is_refused_in_the_run_too(out):
    """Where the options fit and the trainer is still between generations, as after an odd number of steps."""
    trainer = Recorded(config(out, (2, 2, 4, 1)))
    trainer._step = 3
    with pytest.raises(InvalidArgument, match=r"2 micro-batches from 3 of .* need a generation that is still to come"):
        trainer.train()


def test_accumulation_that_changes_amid_a_step_is_refused(out):
    class Changed(Recorded):
        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
            self.current_gradient_accumulation_steps = 1
            return super()._prepare_inputs(generation_batch)

    with pytest.raises(
        InvalidArgument, match="the optimizer step goes on after micro-batch 1 of the 1 that were selected together"
    ):
        Changed(config(out)).train()


def test_tensor_parallel_ranks_are_refused(out):
    class Tensors(ParallelismConfig):
        def __post_init__(self) -> None:
            """Without the check against the number of processes."""
            self.cp_size = self.sp_size = 1

    with pytest.raises(InvalidArgument, match=r"parallelism_config must have tp_size=1: .*got 2"):
        config(out, parallelism_config=Tensors(tp_size=2))


def test_generation_by_transformers_is_refused(out):
    trainer = Recorded(config(out, max_completion_length=4), rollout_func=None)
    with pytest.raises(MissingBehaviorLogProbs, match="set use_vllm=True, or pass a rollout_func that returns logprobs"):
        trainer.train()


def test_grpos_config_is_refused(out):
    with pytest.raises(InvalidType, match="args must be an M2POConfig; got GRPOConfig"):
        M2POTrainer(tiny.model(), tiny.reward, GRPOConfig(out, use_cpu=True, bf16=False), train_dataset=tiny.dataset())


def test_arguments_are_those_of_grpos_trainer():
    """reward_funcs may be missing, as an environment may give the reward; args is what says that this is M2PO."""
    ours, theirs = (list(inspect.signature(t.__init__).parameters.values())[1:4] for t in (M2POTrainer, GRPOTrainer))
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]
    with pytest.raises(InvalidType, match="args must be an M2POConfig; got None"):
        M2POTrainer(tiny.model(), tiny.reward, train_dataset=tiny.dataset())


def test_a_copy_of_the_head_by_peft_is_refused_with_the_option_to_set(out):
    peft = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(InvalidArgument, match=r"modules_to_save, or .*linear_log_probs=False.*got ModulesToSaveWrapper"):
        Recorded(config(out), peft_config=peft)
    trainer = Recorded(config(out, steps=1, linear_log_probs=False), peft_config=peft)
    head = trainer.model.get_output_embeddings()
    before = head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(head.weight, before)


def server(mode: str) -> SimpleNamespace:
    """What check_logprobs_mode reads of a VLLMGeneration; tests of two ranks use it too."""
    info = {"model_config": {"logprobs_mode": mode}}
    return SimpleNamespace(vllm_client=SimpleNamespace(get_server_info=lambda: info))


def test_a_server_with_raw_log_probs_is_refused():
    check_logprobs_mode(server("processed_logprobs"), Accelerator(cpu=True))
    with pytest.raises(InvalidArgument, match="--logprobs-mode processed_logprobs; it runs with raw_logprobs"):
        check_logprobs_mode(server("raw_logprobs"), Accelerator(cpu=True))


def test_what_is_read_of_vllm_is_there():
    """vLLM does not run here. The server's mode is read where TRL reads it, and log-probs come back with the correction off."""
    init = inspect.getsource(GRPOTrainer.__init__)
    assert 'self.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]' in init
    assert callable(VLLMClient.get_server_info)
    assert "logprobs" in inspect.signature(VLLMGeneration.__init__).parameters
    assert "vllm_importance_sampling_correction" not in inspect.getsource(GRPOTrainer._generate_single_turn)


def test_another_version_is_warned_of(out, monkeypatch):
    monkeypatch.setitem(common.TESTED, "trl", "0.0.1")
    with pytest.warns(UserWarning, match=r"tested with trl 0\.0\.1; installed is trl 1\.16\.0"):
        Recorded(config(out))


def test_the_tested_versions_are_those_installed(out):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for name in ("trl", "transformers"):
            common.check_version(name)


def test_options_are_those_of_a_command_line(out):
    (args,) = TrlParser((M2POConfig,)).parse_args_and_config(
        [
            "--output_dir",
            out,
            "--use_cpu",
            "--bf16",
            "False",
            "--m2_threshold",
            "0.1",
            "--scope",
            "all",
            "--linear_log_probs",
            "False",
        ]
    )
    assert (args.m2_threshold, args.scope, args.linear_log_probs) == (0.1, "all", False)


def test_delta_caps_the_ratio_where_the_advantage_is_negative(out):
    """A cap that every ratio exceeds leaves no gradient there, so it differs from the uncapped one."""
    gradients = []

    def check(trainer: Recorded, _: Any) -> None:
        gradients.append(tiny.gradient(trainer.model))

    for delta in (None, 1.01):
        Recorded(config(out, steps=1, delta=delta), check).train()
    assert not torch.allclose(*gradients)
