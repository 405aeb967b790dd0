# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether a model's log-probabilities depend on the padding around a row: then no column of it may go."""

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

# A model depends on its padding if padding moves a row by this many times as much as a jitter of its embeddings by 8
# units in the last place does, and by more than log-probabilities can resolve. Over 50 families, with 2 to 48 layers,
# rounding makes 0 to 1.5 times of it, and padding that is felt 39 (a bias in a convolution) to 1,400,000 (absolute
# positions).
TIMES_ROUNDING, LEAST_MOVE = 10, 1e-6


def why_padding_is_felt(
    model: PreTrainedModel, run: Callable[..., tuple], pad_token_id: int, has_images: bool, accelerator: Accelerator
) -> str | None:
    """
    Return why a model's outputs depend on padding, or `None`. Every rank must call it, because finding out may run the
    model.
    """
    # `run` takes ids, their mask and how many of the last tokens' log-probabilities are wanted: what it returns first.
    reason = why_positions_are_absolute(model.config)
    keeps_state = getattr(model, "_is_stateful", False) or any(isinstance(part, nn.Conv1d) for part in model.modules())
    # Models with images take no plain row.
    if reason is None and not has_images and (keeps_state or not has_plain_attention(model.config)):
        ask = partial(_moves, model, run, pad_token_id, accelerator)
        is_sharded = any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in model.parameters())
        found = ask() if is_sharded else None  # on all ranks; with FSDP the others need not hold the weights yet
        moved, rounding = on_main_process(lambda: found or ask())
        if moved > TIMES_ROUNDING * rounding + LEAST_MOVE:
            reason = f"a row's log-probabilities move by {moved:.2g} in the mean when it is padded"
    if reason is not None and accelerator.is_main_process:
        logger.warning(
            f"This model depends on its padding: {reason}. Micro-batches keep the widths that GRPOTrainer gives them, "
            "and are not cut to equal cost."
        )
    return reason


@torch.no_grad()
def _moves(
    model: PreTrainedModel, run: Callable[..., tuple], pad_token_id: int, accelerator: Accelerator
) -> tuple[float, float]:
    """
    Return the mean change of a row's log-probabilities when it is padded on either side, and the change by rounding.
    """
    text_config = model.config.get_text_config(decoder=True)
    num_tokens = min(32, (getattr(text_config, "max_position_embeddings", None) or 64) // 2)
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(text_config.vocab_size, (4, num_tokens), generator=chance).to(accelerator.device)
    tokens, fill = torch.ones_like(ids), torch.full_like(ids[:, 1:], pad_token_id)  # an odd number, no chunk's width
    padding = torch.zeros_like(fill)

    def of_rows(ids: Tensor, mask: Tensor, first: int = 0) -> Tensor:
        """Return the log-probabilities of a row's tokens except the first one, which is in column `first`."""
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
    # A row's mean, of four rows: rounding may send a token of one of them to other experts, padding moves them all.
    moved = torch.maximum((left - alone).abs().mean(1), (right - alone).abs().mean(1)).min()
    return moved.item(), (rounded - alone).abs().mean(1).median().item()


@contextmanager
def _exact(model: PreTrainedModel, accelerator: Accelerator) -> Iterator[None]:
    """While it lasts, no dropout, and float32 without TF32, whatever training computes in."""
    attention = model.config._attn_implementation
    with ExitStack() as stack:
        stack.enter_context(training_mode(model, training=False))
        stack.enter_context(patched(accelerator, autocast_handler=AutocastKwargs(enabled=False)))
        for setting in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):  # type: ignore[attr-defined]
            stack.enter_context(patched(setting, fp32_precision="ieee"))
        if "flash" in str(attention):  # 16 bits only
            stack.callback(model.set_attn_implementation, attention)
            model.set_attn_implementation("eager")
        if not any(isinstance(weight, DTensor) for weight in model.parameters()):  # which FSDP brings itself
            _bring_in_float32(model, accelerator.device, stack)
        yield


def _bring_in_float32(model: nn.Module, device: torch.device, stack: ExitStack) -> None:
    """Gather what surrounds the layers at once, and each layer for its passes, until the stack is closed."""
    layers = [layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part]
    inside = {part for layer in layers for part in layer.modules()}
    stack.enter_context(_in_float32([part for part in model.modules() if part not in inside], device))
    for layer in layers:
        brought = ExitStack()
        bring = partial(_in_float32, list(layer.modules()), device)
        stack.enter_context(layer.register_forward_pre_hook(lambda *_, b=bring, to=brought: to.enter_context(b())))
        stack.enter_context(layer.register_forward_hook(lambda *_, to=brought: to.close(), always_call=True))


@contextmanager
def _in_float32(parts: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Their weights on the device, those of 16 bits in float32; afterwards as they were."""
    weights = [weight for part in parts for weight in part.parameters(recurse=False)]
    with ExitStack() as stack:
        stack.enter_context(GatheredParameters(weights))  # with ZeRO-3
        for linear in [part for part in parts if hasattr(part, "compute_dtype")]:  # in 4 bits
            stack.enter_context(patched(linear, compute_dtype=torch.float32))
        for tensor in (*weights, *(buffer for part in parts for buffer in part.buffers(recurse=False))):
            dtype = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
            if (tensor.device, tensor.dtype) != (device, dtype):
                stack.enter_context(patched(tensor, data=tensor.data.to(device, dtype)))
        yield
