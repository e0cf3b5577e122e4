#!/usr/bin/env bash
# GRPO with M2PO on one machine with GPUs, rollouts by vLLM beside the training. MODEL and DATASET are yours.
set -euo pipefail
: "${MODEL:=Qwen/Qwen2.5-1.5B-Instruct}" "${DATASET:=AI-MO/NuminaMath-TIR#1000}" "${NPROC_PER_NODE:=8}"
export NPROC_PER_NODE

swift rlhf \
  --rlhf_type grpo \
  --external_plugins "$(dirname "$0")/m2po_plugin.py" \
  --loss_type dapo \
  --model "$MODEL" \
  --dataset "$DATASET" \
  --reward_funcs accuracy \
  --use_vllm true \
  --vllm_mode colocate \
  --num_generations 8 \
  --per_device_train_batch_size 4 \
  --gradient_accumulation_steps 4 \
  --steps_per_generation 16 \
  --num_iterations 1 \
  --max_completion_length 2048 \
  --beta 0 \
  --torch_dtype bfloat16 \
  --learning_rate 1e-6 \
  --logging_steps 1 \
  --output_dir output/m2po
