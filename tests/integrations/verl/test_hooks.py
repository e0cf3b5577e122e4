"""verl's own hooks: what the adapter gives them, and the Megatron engine, which cannot run here, by its source."""

from __future__ import annotations

import ast
import inspect
import os
import pathlib
import shlex
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import verl
import workers
from hydra import compose, initialize_config_dir
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, get_policy_loss_fn
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngineWithLMHead

from m2po_kernels.integrations.verl import M2POFSDPEngine, m2po_policy_loss

PACKAGE = pathlib.Path(verl.__file__).parent
EXAMPLE = pathlib.Path(__file__).parents[3] / "examples/verl/m2po.sh"


def test_registered():
    assert get_policy_loss_fn("m2po") is m2po_policy_loss
    for strategy in ("fsdp", "fsdp2"):
        assert EngineRegistry.get_engine_cls("language_model", strategy) is M2POFSDPEngine
        assert EngineRegistry.get_engine_cls("value_model", strategy).__module__.startswith("verl.")


def test_the_policy_loss_takes_what_verl_passes():
    assert list(inspect.signature(m2po_policy_loss).parameters) == list(inspect.signature(compute_policy_loss_vanilla).parameters)


@pytest.mark.parametrize("engine", [BaseEngine, FSDPEngineWithLMHead])
def test_engine_methods(engine):
    assert list(inspect.signature(engine.train_batch).parameters) == ["self", "data", "loss_function"]
    assert list(inspect.signature(engine.infer_batch).parameters) == ["self", "data", "loss_function"]


@pytest.mark.parametrize(("vendor", "loaded"), [("m2po", True), (None, False), ("nvidia", False)])
def test_the_entry_point_loads_the_engine_only_where_asked(vendor, loaded):
    assert [e.value for e in entry_points(group="verl.plugins") if e.name == "m2po"] == ["m2po_kernels.integrations.verl_plugin"]
    environment = {name: value for name, value in os.environ.items() if name != "VERL_ENGINE_VENDOR"}
    if vendor is not None:
        environment["VERL_ENGINE_VENDOR"] = vendor
    code = "import verl, sys; print('m2po_kernels.integrations.verl' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(loaded)]


def test_the_configuration_class_can_be_imported_before_verl():
    """As hydra does in a worker whose verl did not load the plugin."""
    code = "import m2po_kernels.integrations.verl; from verl.trainer.ppo import core_algos; core_algos.get_policy_loss_fn('m2po')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_megatron_engine_by_its_source():
    """It calls the loss function once for each micro-batch, with these names, and takes back what Megatron divides by."""
    tree = ast.parse((PACKAGE / "workers/engine/megatron/transformer_impl.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert [ast.unparse(base) for base in classes["MegatronEngine"].bases] == ["BaseEngine"]
    assert [ast.unparse(base) for base in classes["MegatronEngineWithLMHead"].bases] == ["MegatronEngine"]
    body = [*classes["MegatronEngine"].body, *classes["MegatronEngineWithLMHead"].body]
    methods = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assert {"get_data_parallel_group", "get_data_parallel_size", "forward_backward_batch"} <= methods
    assert not {"train_batch", "infer_batch"} & methods  # ours call those of BaseEngine
    calls = [
        node
        for node in ast.walk(classes["MegatronEngineWithLMHead"])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "loss_function"
    ]
    assert [[keyword.arg for keyword in call.keywords] for call in calls] == [["model_output", "data", "dp_group"]]
    source = ast.unparse(classes["MegatronEngineWithLMHead"])
    assert "scaled_loss = loss * data['num_micro_batch']" in source
    assert "dynamic_context_parallel" in source


def test_the_example_is_a_configuration():
    """Its options compose with verl's, and hold those that these tests use."""
    command = EXAMPLE.read_text().split("exec ")[1].replace("\\\n", " ")
    words = shlex.split(command.replace('"$@"', "").replace("$DATA", "/data").replace("$MODEL", "model"))
    overrides = words[words.index("verl.trainer.main_ppo") + 1 :]
    assert set(workers.M2PO) <= set(overrides)
    with initialize_config_dir(str(PACKAGE / "trainer/config"), version_base=None):
        assert compose("ppo_trainer", overrides=overrides).actor_rollout_ref.actor.policy_loss.m2_threshold == 0.04
