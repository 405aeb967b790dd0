# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The engines of this process: transformers and vLLM."""

import logging
import os
from typing import cast

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..update.swap import in_mode, swapped
from .jobs import Completion, Job, OnCompletion, Sampling


logger = logging.getLogger(__name__)


def generate_with_transformers(
    jobs: list[Job],
    sampling: Sampling,
    on_completion: OnCompletion,
    *,
    model: str | os.PathLike | PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | None,
    batch_size: int,
) -> None:
    """Batch by batch, on the accelerator if there is one. Raises `MemoryError` if a batch does not fit."""
    tokenizer = processing_class
    if tokenizer is None:
        assert isinstance(model, str | os.PathLike)  # a loaded model comes with its tokenizer
        tokenizer = AutoTokenizer.from_pretrained(model)
    prompt_ids = _encode_prompts(tokenizer, jobs)
    if isinstance(model, str | os.PathLike):
        model = AutoModelForCausalLM.from_pretrained(model, dtype="auto", device_map="auto")
    num_positions = max(map(len, prompt_ids)) + sampling.max_completion_length
    limit = model.config.get_text_config().to_dict().get("max_position_embeddings")
    if limit is not None and num_positions > limit:
        logger.warning(
            f"The longest prompt and `max_completion_length` come to {num_positions} tokens, the model is made for "
            f"{limit}: what it says beyond may be noise."
        )
    # The tokens that end a completion are the model's and the tokenizer's, as servers have it.
    eos = model.generation_config.eos_token_id
    eos_ids = ({eos} if isinstance(eos, int) else {*(eos or [])}) | ({tokenizer.eos_token_id} - {None})
    pad_id = min(eos_ids, default=0) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    how = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k") if sampling.temperature > 0}
    generation_config = transformers.GenerationConfig(
        max_new_tokens=sampling.max_completion_length,
        do_sample=bool(how),
        eos_token_id=sorted(eos_ids),
        pad_token_id=pad_id,
        **how,
    )
    for start in range(0, len(jobs), batch_size):
        batch, rows = jobs[start : start + batch_size], prompt_ids[start : start + batch_size]
        width = max(map(len, rows))
        input_ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        devices = [model.device] if model.device.type == "cuda" else []
        try:
            # With these settings alone: `generate` fills gaps from those that a model comes with.
            with swapped(model, generation_config=generation_config), in_mode(model, training=False):
                # Afterwards come the random numbers that would have come.
                with torch.no_grad(), torch.random.fork_rng(devices):
                    torch.manual_seed(batch[0].seed)
                    # Of a mixin that every model with a head has.
                    outputs = model.generate(input_ids=input_ids, attention_mask=mask)  # type: ignore[operator]
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{len(batch)} completions of up to {sampling.max_completion_length} tokens do not fit in the memory "
                f"of {model.device}: lower `batch_size`, which is {batch_size}."
            ) from error
        for job, output in zip(batch, outputs[:, width:].tolist(), strict=True):
            end = next((i for i, token in enumerate(output) if token in eos_ids), None)
            ids = output if end is None else output[: end + 1]
            text = cast(str, tokenizer.decode(ids, skip_special_tokens=True))  # of one completion, no batch
            on_completion(job, Completion(text, len(ids), end is None))


def _encode_prompts(tokenizer: PreTrainedTokenizerBase, jobs: list[Job]) -> list[list[int]]:
    """Token ids of each job's prompt; the completions of one problem share theirs."""
    known: dict[str, list[int]] = {}
    for job in jobs:
        if job.problem in known:
            continue
        if isinstance(job.prompt, str):
            known[job.problem] = tokenizer(job.prompt)["input_ids"]
            continue
        if tokenizer.chat_template is None:
            raise ValueError(
                f"The tokenizer of `{tokenizer.name_or_path}` has no chat template, and the prompts are messages. "
                "Save it with a `chat_template`, or give `trl_dapo.evaluation.evaluate` in Python a `Dataset` whose "
                "prompts are plain text: those of files are read as messages."
            )
        text = tokenizer.apply_chat_template(job.prompt, tokenize=False, add_generation_prompt=True)
        known[job.problem] = tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has put them in
    return [known[job.problem] for job in jobs]


# ---- vLLM ----


def generate_with_vllm(
    jobs: list[Job],
    sampling: Sampling,
    on_completion: OnCompletion,
    *,
    model: str | os.PathLike,
    tensor_parallel_size: int,
) -> None:
    """All jobs in one continuous batch. Raises `ImportError` without vLLM, `ValueError` if `model` is an adapter."""
    try:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind
    except ImportError as error:
        raise ImportError(
            "The engine 'vllm' needs vLLM, which cannot be imported here: `pip install 'trl[vllm]'`, or give the "
            f"address of a server that runs elsewhere as `base_url`. ({error})"
        ) from error

    if os.path.isfile(os.path.join(model, "adapter_config.json")):
        raise ValueError(
            f"`{model}` is an adapter. Merge it into its model first (`merge_and_unload`), or use the engine "
            "'transformers'."
        )
    prompt_ids = _encode_prompts(AutoTokenizer.from_pretrained(model), jobs)
    llm = LLM(
        model=str(model),
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max(map(len, prompt_ids)) + sampling.max_completion_length,
        # Seeds of single requests cost vLLM its batched sampler. This one never comes back: no two calls are for the
        # same jobs, unless the first of them brought nothing.
        seed=sum(job.seed for job in jobs) % 2**31,
    )
    # `LLM.generate` returns when all are answered; its engine says which are after every step.
    engine = llm.llm_engine
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_completion_length,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    try:
        for number, ids in enumerate(prompt_ids):
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answer = output.outputs[0]
                    completion = Completion(answer.text, len(answer.token_ids), answer.finish_reason == "length")
                    on_completion(jobs[int(output.request_id)], completion)
    finally:
        # Its processes would keep the memory that the next model needs, and may keep this process from ending.
        engine.engine_core.shutdown()
