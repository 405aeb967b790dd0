# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""The engines of this process: transformers and vLLM."""

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

from ..sampling.example_names import digest
from ..update.patching import training_mode
from .jobs import GeneratedCompletion, Job, OnCompletion, SamplingSettings


logger = logging.getLogger(__name__)


# What an evaluation sets itself, of what a model's own generation config may say.
_SET_HERE = {"temperature", "top_p", "top_k", "repetition_penalty", "do_sample", "max_length"}
_SET_HERE |= {"max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id", "transformers_version"}
_SET_HERE |= {"_from_model_config", "use_cache"}


# What a config says that changes no completion.
_NOT_OF_A_MODEL = {
    "transformers_version",
    "_name_or_path",
    "base_model_name_or_path",
    "inference_mode",
    "use_cache",
    "peft_version",
}
_A_TEXT = "What is 17 + 25? Answer: 42"  # whose tokens tell tokenizers apart, and whether they add any


def load_tokenizer(
    model: str | os.PathLike | PreTrainedModel, processing_class: PreTrainedTokenizerBase | None
) -> PreTrainedTokenizerBase:
    if processing_class is not None:
        return processing_class
    assert isinstance(model, str | os.PathLike)  # a loaded model comes with its tokenizer
    return AutoTokenizer.from_pretrained(model)


def what_decides(
    model: str | os.PathLike | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    is_chat: bool,
    weights_digest: Callable[[Any], str | None],
) -> dict[str, Any]:
    """
    Return what completions depend on besides the weights and the sampling parameters, as settings of an evaluation.
    """
    decides: dict[str, Any] = {}
    config = _generation_config(model)
    decides["eos_token_id"] = _end_token_ids(config, tokenizer)
    # Tokens that are suppressed, for instance.
    others = {name: value for name, value in config.to_diff_dict().items() if name not in _SET_HERE and value}
    if others:
        decides["generation_config"] = others
    if is_chat:
        decides["chat_template"] = digest(str(tokenizer.chat_template))
    decides["tokens_of_a_text"] = tokenizer(text=_A_TEXT)["input_ids"]
    decides["config"] = _config_digest(model)
    if base := _base_of(model):
        decides |= {"base_model": base, "base_weights": weights_digest(base), "base_config": _config_digest(base)}
    return decides


def _config_digest(model: str | os.PathLike | PreTrainedModel) -> str | None:
    """A hash of a model's or an adapter's config; `None` of one that is not on this disk."""
    if not isinstance(model, str | os.PathLike):
        config = model.config.to_dict()
    else:
        files = (Path(model) / name for name in ("adapter_config.json", "config.json"))
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            return None
        config = json.loads(file.read_text())
    kept = {name: value for name, value in config.items() if name not in _NOT_OF_A_MODEL}
    modules = kept.get("target_modules")
    if isinstance(modules, list):
        kept["target_modules"] = sorted(modules)  # which peft writes in any order
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
    except OSError:  # it has none of its own
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(name))


def _end_token_ids(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a completion: the model's and the tokenizer's, as in training and as servers have it."""
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
    """Batch by batch, on the accelerator if there is one. Raises `MemoryError` if a batch does not fit."""
    tokenizer = processing_class
    prompt_ids = _encode_prompts(tokenizer, jobs, chat_template_kwargs)
    if isinstance(model, str | os.PathLike):
        model = AutoModelForCausalLM.from_pretrained(model, dtype="auto", device_map="auto")
    num_positions = max(map(len, prompt_ids)) + sampling.max_completion_length
    limit = model.config.get_text_config().to_dict().get("max_position_embeddings")
    if limit is not None and num_positions > limit:
        logger.warning(
            f"The longest prompt and `max_completion_length` come to {num_positions} tokens, the model is made for "
            f"{limit}: what it says beyond may be noise."
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
    # As in training: what is not set here, such as tokens to suppress, `generate` takes from the model's own.
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
                # Afterwards come the random numbers that would have come.
                with torch.no_grad(), torch.random.fork_rng(devices):
                    torch.manual_seed(batch[0].seed)
                    # Part of a mixin that every model with a head has.
                    outputs = model.generate(  # type: ignore[operator]
                        input_ids=input_ids, attention_mask=mask, generation_config=generation_config
                    )
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                f"{len(batch)} completions of up to {sampling.max_completion_length} tokens do not fit in the memory "
                f"of {model.device}: lower `batch_size`, which is {batch_size}."
            ) from error
        completions = []
        for output in outputs[:, width:].tolist():
            end = next((i for i, token in enumerate(output) if token in eos_ids), None)
            ids = output if end is None else output[: end + 1]
            text = cast(str, tokenizer.decode(ids, skip_special_tokens=True))  # of one completion, no batch
            completions.append(GeneratedCompletion(text, len(ids), end is None, ids))
        _hand_over(batch, completions, on_completion)


def _hand_over(jobs: list[Job], completions: list[GeneratedCompletion], on_completion: OnCompletion) -> None:
    """Hands over all of these completions, and raises only then what the first that failed has raised."""
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
    """Token ids of each job's prompt, as in training; the completions of one problem share theirs."""
    known: dict[str, list[int]] = {}
    for job in jobs:
        if job.problem in known:
            continue
        if isinstance(job.prompt, str):
            known[job.problem] = tokenizer(text=job.prompt)["input_ids"]
            if not known[job.problem]:
                raise ValueError("A prompt has no text, and the tokenizer adds none: leave such rows out.")
            continue
        if tokenizer.chat_template is None:
            raise ValueError(
                f"The tokenizer of `{tokenizer.name_or_path}` has no chat template, and the prompts are messages. "
                "Save it with a `chat_template`, or give prompts that are text: a file with a column `prompt` of "
                "text, with `prompt_style='as_is'`."
            )
        encoded = tokenizer.apply_chat_template(
            job.prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **(chat_template_kwargs or {})
        )
        known[job.problem] = cast(dict[str, list[int]], encoded)["input_ids"]
    return [known[job.problem] for job in jobs]


# ---- vLLM ----


def check_vllm(model: str | os.PathLike) -> None:
    """Raises `ImportError` without vLLM, `ValueError` if `model` is an adapter."""
    try:
        import vllm  # noqa: F401  # whether it can be
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
    """All jobs in one continuous batch, on what [`check_vllm`] lets pass."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt_ids = _encode_prompts(processing_class, jobs, chat_template_kwargs)
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
                answer = output.outputs[0]
                ids = list(answer.token_ids)
                completions.append(GeneratedCompletion(answer.text, len(ids), answer.finish_reason == "length", ids))
            _hand_over([jobs[int(output.request_id)] for output in finished], completions, on_completion)
    finally:
        # Its processes would keep the memory that the next model needs, and may keep this process from ending.
        engine.engine_core.shutdown()
