# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""A check whether a model's log-probabilities depend on the padding of a row. If so, padding must not be removed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, GatheredParameters
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..models import has_plain_attention, why_positions_are_absolute
from ..ranks import on_main_process
from .patching import patched, training_mode


logger = logging.get_logger(__name__)

# A model depends on its padding if padding a row changes its log-probabilities by more than MIN_CHANGE, and by more
# than TIMES_ROUNDING times the change from rounding. The latter is measured by adding noise of 8 units in the last
# place to the embeddings. Over 50 model families with 2 to 48 layers, padding that should not matter causes 0 to 1.5
# times the change from rounding. Padding that matters causes 39 times (a bias in a convolution) to 1,400,000 times
# (absolute positions).
TIMES_ROUNDING, MIN_CHANGE = 10, 1e-6


def why_padding_matters(
    model: PreTrainedModel, run: Callable[..., tuple], pad_token_id: int, has_images: bool, accelerator: Accelerator
) -> str | None:
    """
    Return why a model depends on its padding, with a warning, or `None` if it does not. Collective.

    `run` is called with token ids, their mask, and the number of last tokens whose log-probabilities are needed. It
    returns these as its first value.
    """
    reason = why_positions_are_absolute(model.config)
    keeps_state = getattr(model, "_is_stateful", False) or any(isinstance(part, nn.Conv1d) for part in model.modules())
    # Models with images do not accept rows of tokens alone.
    if reason is None and not has_images and (keeps_state or not has_plain_attention(model.config)):
        measure = partial(_measure_changes, model, run, pad_token_id, accelerator)
        is_sharded = any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in model.parameters())
        # Sharded weights need all processes. Otherwise only the main process may have the weights yet, as with FSDP.
        changes = measure() if is_sharded else None
        change, rounding = on_main_process(lambda: changes or measure())
        if change > TIMES_ROUNDING * rounding + MIN_CHANGE:
            reason = f"the log-probabilities of a row change by {change:.2g} on average when it is padded"
    if reason is not None and accelerator.is_main_process:
        logger.warning(
            f"The log-probabilities of this model depend on padding: {reason}. So micro-batches keep the width that "
            "`GRPOTrainer` gives them, and are not divided anew to have equal cost. Training is correct, but slower "
            "than with a model that does not depend on padding."
        )
    return reason


@torch.no_grad()
def _measure_changes(
    model: PreTrainedModel, run: Callable[..., tuple], pad_token_id: int, accelerator: Accelerator
) -> tuple[float, float]:
    """Return the mean change of a row's log-probabilities from padding it on either side, and that from rounding."""
    text_config = model.config.get_text_config(decoder=True)
    num_tokens = min(32, (getattr(text_config, "max_position_embeddings", None) or 64) // 2)
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(text_config.vocab_size, (4, num_tokens), generator=chance).to(accelerator.device)
    # An odd number of padding tokens, so that they do not fill whole chunks of an implementation.
    tokens, fill = torch.ones_like(ids), torch.full_like(ids[:, 1:], pad_token_id)
    padding = torch.zeros_like(fill)

    def of_rows(ids: Tensor, mask: Tensor, first: int = 0) -> Tensor:
        """Return the log-probabilities of all tokens of each row except the first, which is in column `first`."""
        return run(ids, mask, ids.size(1) - first - 1)[0][:, : num_tokens - 1].float()

    def jitter(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=chance).to(output)
        return output * (1 + 8 * torch.finfo(output.dtype).eps * noise)

    with _exact(model, accelerator):
        alone = of_rows(ids, tokens)
        left = of_rows(torch.cat([fill, ids], 1), torch.cat([padding, tokens], 1), num_tokens - 1)
        right = of_rows(torch.cat([ids, fill], 1), torch.cat([tokens, padding], 1))
        with model.get_input_embeddings().register_forward_hook(jitter):
            rounded = of_rows(ids, tokens)
    # The smallest of the means of four rows: rounding may route a token of one row to other experts, but padding that
    # matters changes all rows.
    change = torch.maximum((left - alone).abs().mean(1), (right - alone).abs().mean(1)).min()
    return change.item(), (rounded - alone).abs().mean(1).median().item()


@contextmanager
def _exact(model: PreTrainedModel, accelerator: Accelerator) -> Iterator[None]:
    """Disable dropout and compute in float32 without TF32 within a block, whatever training computes in."""
    attention = model.config._attn_implementation
    with ExitStack() as stack:
        stack.enter_context(training_mode(model, training=False))
        stack.enter_context(patched(accelerator, autocast_handler=AutocastKwargs(enabled=False)))
        for setting in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):  # type: ignore[attr-defined]
            stack.enter_context(patched(setting, fp32_precision="ieee"))
        if "flash" in str(attention):  # flash attention does not support float32
            stack.callback(model.set_attn_implementation, attention)
            model.set_attn_implementation("eager")
        if not any(
            isinstance(weight, DTensor) for weight in model.parameters()
        ):  # FSDP gathers sharded weights itself
            _load_in_float32(model, accelerator.device, stack)
        yield


def _load_in_float32(model: nn.Module, device: torch.device, stack: ExitStack) -> None:
    """
    Convert the weights outside of layers to float32 until the stack is closed, and those of each layer only while the
    layer runs.
    """
    layers = [layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part]
    inside = {part for layer in layers for part in layer.modules()}
    stack.enter_context(_in_float32([part for part in model.modules() if part not in inside], device))
    for layer in layers:
        loaded = ExitStack()
        load = partial(_in_float32, list(layer.modules()), device)
        stack.enter_context(layer.register_forward_pre_hook(lambda *_, f=load, to=loaded: to.enter_context(f())))
        stack.enter_context(layer.register_forward_hook(lambda *_, to=loaded: to.close(), always_call=True))


@contextmanager
def _in_float32(parts: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Move the weights and buffers of modules to the device within a block, and convert 16-bit ones to float32."""
    weights = [weight for part in parts for weight in part.parameters(recurse=False)]
    with ExitStack() as stack:
        stack.enter_context(GatheredParameters(weights))  # needed with ZeRO-3
        for linear in [part for part in parts if hasattr(part, "compute_dtype")]:  # 4-bit layers
            stack.enter_context(patched(linear, compute_dtype=torch.float32))
        for tensor in (*weights, *(buffer for part in parts for buffer in part.buffers(recurse=False))):
            dtype = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
            if (tensor.device, tensor.dtype) != (device, dtype):
                stack.enter_context(patched(tensor, data=tensor.data.to(device, dtype)))
        yield
