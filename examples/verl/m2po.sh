#!/usr/bin/env bash
# GRPO with M2PO on one node of 8 GPUs, verl 0.9.1. Data: verl's examples/data_preprocess/gsm8k.py.
set -euo pipefail
export VERL_ENGINE_VENDOR=m2po
: "${DATA:=$HOME/data/gsm8k}" "${MODEL:=Qwen/Qwen2.5-1.5B-Instruct}"

# shellcheck disable=SC2016  # verl resolves the interpolation, not the shell
exec python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.rollout_correction.bypass_mode=True \
  actor_rollout_ref.actor.policy_loss._target_=m2po_kernels.integrations.verl.M2POPolicyLossConfig \
  actor_rollout_ref.actor.policy_loss.loss_mode=m2po \
  +actor_rollout_ref.actor.policy_loss.m2_threshold=0.04 \
  +actor_rollout_ref.actor.policy_loss.rollout_correction='${algorithm.rollout_correction}' \
  +actor_rollout_ref.actor.policy_loss.rollout='${actor_rollout_ref.rollout}' \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.train_batch_size=512 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  trainer.n_gpus_per_node=8 \
  trainer.total_epochs=3 \
  trainer.logger='[console]' \
  "$@"
