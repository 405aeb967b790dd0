# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Engines that run in this process: transformers and vLLM."""

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..run.terminal import progress_bars_on_terminals_only
from ..sampling.example_names import digest
from ..update.patching import training_mode
from .jobs import GeneratedCompletion, Job, OnCompletion, SamplingSettings


logger = logging.getLogger(__name__)


# Fields of a model's generation config that an evaluation sets itself.
_SET_BY_EVALUATION = {"temperature", "top_p", "top_k", "repetition_penalty", "do_sample", "max_length"}
_SET_BY_EVALUATION |= {"max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id", "transformers_version"}
_SET_BY_EVALUATION |= {"_from_model_config", "use_cache"}


# Fields of a model's config that do not change its completions.
_WITHOUT_EFFECT = {
    "transformers_version",
    "_name_or_path",
    "base_model_name_or_path",
    "inference_mode",
    "use_cache",
    "peft_version",
}
_PROBE_TEXT = "What is 17 + 25? Answer: 42"  # its tokens show whether two tokenizers differ


def load_tokenizer(
    model: str | os.PathLike | PreTrainedModel, processing_class: PreTrainedTokenizerBase | None
) -> PreTrainedTokenizerBase:
    if processing_class is not None:
        return processing_class
    assert isinstance(model, str | os.PathLike)  # a loaded model comes with its tokenizer
    return AutoTokenizer.from_pretrained(model)


def model_settings(
    model: str | os.PathLike | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    is_chat: bool,
    weights_digest: Callable[[Any], str | None],
) -> dict[str, Any]:
    """Return what completions depend on besides the weights and the sampling settings."""
    found: dict[str, Any] = {}
    config = _generation_config(model)
    found["eos_token_id"] = _end_token_ids(config, tokenizer)
    # For instance tokens to suppress.
    others = {name: value for name, value in config.to_diff_dict().items() if name not in _SET_BY_EVALUATION and value}
    if others:
        found["generation_config"] = others
    if is_chat:
        found["chat_template"] = digest(str(tokenizer.chat_template))
    found["tokens_of_a_text"] = tokenizer(text=_PROBE_TEXT)["input_ids"]
    found["config"] = _config_digest(model)
    if base := _base_of(model):
        found |= {"base_model": base, "base_weights": weights_digest(base), "base_config": _config_digest(base)}
    return found


def _config_digest(model: str | os.PathLike | PreTrainedModel) -> str | None:
    """Return a hash of the config of a model or an adapter, or `None` if it is not a local folder."""
    if not isinstance(model, str | os.PathLike):
        config = model.config.to_dict()
    else:
        files = (Path(model) / name for name in ("adapter_config.json", "config.json"))
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            return None
        config = json.loads(file.read_text())
    kept = {name: value for name, value in config.items() if name not in _WITHOUT_EFFECT}
    modules = kept.get("target_modules")
    if isinstance(modules, list):
        kept["target_modules"] = sorted(modules)  # peft writes them in any order
    return digest(json.dumps(kept, sort_keys=True, default=str))


def _base_of(model: str | os.PathLike | PreTrainedModel) -> str | None:
    """Return the base model of an adapter's folder, or `None` if it is not such a folder."""
    if not isinstance(model, str | os.PathLike):
        return None
    file = Path(model) / "adapter_config.json"
    if not file.is_file():
        return None
    return json.loads(file.read_text()).get("base_model_name_or_path")


def _generation_config(model: str | os.PathLike | PreTrainedModel) -> GenerationConfig:
    if not isinstance(model, str | os.PathLike):
        return model.generation_config
    name = _base_of(model) or model
    try:
        return GenerationConfig.from_pretrained(name)
    except OSError:  # the model has no generation config
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(name))


def _end_token_ids(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a completion: those of the model and of the tokenizer, as in training."""
    eos = config.eos_token_id
    of_model = {eos} if isinstance(eos, int) else set(eos or [])
    of_tokenizer = {tokenizer.eos_token_id} - {None}
    return sorted(of_model | of_tokenizer)


def generate_with_transformers(
    jobs: list[Job],
    sampling: SamplingSettings,
    on_completion: OnCompletion,
    *,
    model: str | os.PathLike | PreTrainedModel,
    processing_class: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    batch_size: int,
) -> None:
    """
    Sample completions with transformers, batch by batch, on a GPU if there is one.

    Raises:
        MemoryError: If a batch does not fit into memory.
    """
    tokenizer = processing_class
    prompt_ids = _encode_prompts(tokenizer, jobs, chat_template_kwargs)
    if isinstance(model, str | os.PathLike):
        with progress_bars_on_terminals_only():
            model = AutoModelForCausalLM.from_pretrained(model, dtype="auto", device_map="auto")
    num_positions = max(map(len, prompt_ids)) + sampling.max_completion_length
    limit = model.config.get_text_config().to_dict().get("max_position_embeddings")
    if limit is not None and num_positions > limit:
        logger.warning(
            f"The longest prompt and `max_completion_length` ({sampling.max_completion_length}) together have "
            f"{num_positions} tokens, which is more than the model's context of {limit}. Beyond its context a model "
            "may write noise. Lower `max_completion_length`."
        )
    eos_ids = _end_token_ids(model.generation_config, tokenizer)
    pad_id = next(iter(eos_ids), 0) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    random_sampling: dict[str, Any] = {}
    if sampling.temperature > 0:
        random_sampling = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p or None,
        }
    # As in training, `generate` uses the model's own generation config for what is not set here, such as tokens to
    # suppress.
    generation_config = GenerationConfig(
        max_new_tokens=sampling.max_completion_length,
        do_sample=bool(random_sampling),
        eos_token_id=eos_ids,
        pad_token_id=pad_id,
        repetition_penalty=1.0,
        **random_sampling,
    )
    for start in range(0, len(jobs), batch_size):
        batch, rows = jobs[start : start + batch_size], prompt_ids[start : start + batch_size]
        width = max(map(len, rows))
        input_ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        devices = [model.device] if model.device.type == "cuda" else []
        try:
            with training_mode(model, training=False):
                # The state of the random number generators is restored afterwards.
                with torch.no_grad(), torch.random.fork_rng(devices):
                    torch.manual_seed(batch[0].seed)
                    # `generate` is part of a mixin that every language model has.
                    outputs = model.generate(  # type: ignore[operator]
                        input_ids=input_ids, attention_mask=mask, generation_config=generation_config
                    )
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{len(batch)} completions of up to {sampling.max_completion_length} tokens do not fit into the "
                f"memory of {model.device}. Lower `batch_size`, which is {batch_size}."
            ) from error
        completions = []
        for output in outputs[:, width:].tolist():
            end = next((i for i, token in enumerate(output) if token in eos_ids), None)
            ids = output if end is None else output[: end + 1]
            text = cast(
                str, tokenizer.decode(ids, skip_special_tokens=True)
            )  # not a list, because it is one completion
            completions.append(GeneratedCompletion(text, len(ids), end is None, ids))
        _pass_on(batch, completions, on_completion)


def _pass_on(jobs: list[Job], completions: list[GeneratedCompletion], on_completion: OnCompletion) -> None:
    """Pass on all completions. If that fails for some of them, raise the first error at the end."""
    failures = []
    for job, completion in zip(jobs, completions, strict=True):
        try:
            on_completion(job, completion)
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _encode_prompts(
    tokenizer: PreTrainedTokenizerBase, jobs: list[Job], chat_template_kwargs: Mapping[str, Any] | None
) -> list[list[int]]:
    """Return the token ids of the prompt of each job, as in training."""
    known: dict[str, list[int]] = {}
    for job in jobs:
        if job.problem in known:
            continue
        if isinstance(job.prompt, str):
            known[job.problem] = tokenizer(text=job.prompt)["input_ids"]
            if not known[job.problem]:
                raise ValueError("A prompt is empty, and the tokenizer adds no token to it. Leave such rows out.")
            continue
        if tokenizer.chat_template is None:
            raise ValueError(
                f"The tokenizer of `{tokenizer.name_or_path}` has no chat template, but the prompts are messages. "
                "Save it with a `chat_template`, or use prompts of plain text: a file with text in the column "
                "`prompt`, with `prompt_style='as_is'`."
            )
        encoded = tokenizer.apply_chat_template(
            job.prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(chat_template_kwargs or {})
        )
        known[job.problem] = cast(dict[str, list[int]], encoded)["input_ids"]
    return [known[job.problem] for job in jobs]


# ---- vLLM ----


def check_vllm(model: str | os.PathLike) -> None:
    """Raise an `ImportError` if vLLM cannot be imported, or a `ValueError` if `model` is an adapter."""
    try:
        import vllm  # noqa: F401  # only to see whether it can be imported
    except ImportError as error:
        raise ImportError(
            f"The engine 'vllm' needs vLLM, which cannot be imported ({error}). Run `pip install 'trl[vllm]'`, or set "
            "`base_url` to the address of a server that runs elsewhere."
        ) from error
    if os.path.isfile(os.path.join(model, "adapter_config.json")):
        raise ValueError(
            f"`{model}` is an adapter, which the engine 'vllm' does not load. Merge it into its model first "
            "(`merge_and_unload`), or use the engine 'transformers'."
        )


def generate_with_vllm(
    jobs: list[Job],
    sampling: SamplingSettings,
    on_completion: OnCompletion,
    *,
    model: str | os.PathLike,
    processing_class: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tensor_parallel_size: int,
) -> None:
    """Sample completions with vLLM, all jobs in one continuous batch. Call [`check_vllm`] first."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt_ids = _encode_prompts(processing_class, jobs, chat_template_kwargs)
    llm = LLM(
        model=str(model),
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max(map(len, prompt_ids)) + sampling.max_completion_length,
        # With a seed per request vLLM would not use its batched sampler. Two calls never have the same seed, because
        # they are for different jobs, unless the first call brought no completion.
        seed=sum(job.seed for job in jobs) % 2**31,
    )
    # `LLM.generate` returns only when all completions are done. Its engine returns them after every step.
    engine = llm.llm_engine
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_completion_length,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    try:
        for number, ids in enumerate(prompt_ids):
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            finished = [output for output in engine.step() if output.finished]
            completions = []
            for output in finished:
                sampled = output.outputs[0]
                ids = list(sampled.token_ids)
                completions.append(GeneratedCompletion(sampled.text, len(ids), sampled.finish_reason == "length", ids))
            _pass_on([jobs[int(output.request_id)] for output in finished], completions, on_completion)
    finally:
        # Otherwise vLLM's processes would keep GPU memory, and might keep this process from ending.
        engine.engine_core.shutdown()
