# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling of completions by the trainer.

The completions are sampled by TRL's engine: vLLM or transformers. This file decides with which parameters it samples,
how long it stays awake, which completions count as cut off, and what is sampled ahead of time: evaluation batches, and
groups for later rollouts.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from trl.trainer.utils import pad

from ..evaluation.scores import Prefetch
from ..ranks import on_main_process
from ..run.stopwatch import Stopwatch
from ..sampling.report import length_metrics
from ..sampling.rounds import RoundRecording
from ..sampling.rows import Row
from ..settings.arguments import read_mapping
from ..update.compat import add_end_tokens, end_tokens
from ..update.patching import patched
from ..update.rollout_tensors import mask_rows
from ..update.typed_trainer import TypedGRPOTrainer
from .ahead import GroupsAhead
from .lora_sync import AdapterGeneration
from .server import check_ahead, naming_lost_server
from .stops import Stops


class GenerationMixin(TypedGRPOTrainer):
    """Samples completions for training and for evaluation, now and ahead of time."""

    # Defined by other parts of the trainer.
    _round_recording: RoundRecording | None

    vllm_generation: AdapterGeneration
    _ahead: GroupsAhead
    _prefetch: Prefetch
    _stops: Stops
    _completion_lengths: Sequence[int] = ()  # number of tokens generated for each latest completion of this process
    _rows_cut_off: Sequence[bool] = ()  # which of these completions were cut off at the length limit

    def _open_engine(self, stopwatch: Stopwatch) -> None:
        """Set up the stops of completions, and sampling ahead: of evaluation batches and groups for later rollouts."""
        kwargs = read_mapping("generation_kwargs", self.args.generation_kwargs) or {}
        if not self.use_vllm:
            vocab_size = self.model.config.get_text_config().vocab_size
            add_end_tokens(self, kwargs.get("eos_token_id"), self._tokenizer.eos_token_id, vocab_size)
        self._stops = Stops(
            self._tokenizer,
            ends=end_tokens(self, self._tokenizer.eos_token_id),
            use_vllm=self.use_vllm,
            generation_kwargs=kwargs,
        )
        client = self.vllm_generation.vllm_client if self._uses_a_server and self.accelerator.is_main_process else None
        if num_rollouts := self.args.rollouts_ahead:
            with self._naming_lost_server():
                on_main_process(check_ahead, client, num_rollouts, self.vllm_generation.why_merged)
        self._prefetch = Prefetch(self._generate_for_evaluation)
        self._ahead = GroupsAhead(
            client=client,
            tokenize=lambda prompts: self._tokenize_prompts(copy.deepcopy(prompts))[0],
            generate=self._generate_without_scoring,
            naming_lost_server=self._naming_lost_server,
            keeping_weights=lambda: patched(self, _last_loaded_step=self.state.global_step),
            waits_for_all=num_rollouts == 1,
            stopwatch=stopwatch,
        )

    @property
    def _uses_a_server(self) -> bool:
        return self.use_vllm and self.args.vllm_mode == "server"

    @property
    def _engine_schedules(self) -> bool:
        """Whether the engine accepts any number of rows in one call and schedules them itself."""
        return self.use_vllm or self.use_transformers_continuous_batching

    def _naming_lost_server(self) -> AbstractContextManager[None]:
        # A rollout function may sample from something else than this server.
        return naming_lost_server(self.args) if self._uses_a_server and self.rollout_func is None else nullcontext()

    def _sample_completions(self, prompts: list) -> tuple:
        if not self._initialized:
            return super()._generate(prompts)
        if not self.model.training and (generated := self._prefetch.take(prompts)) is not None:
            return generated
        self._ahead.join()
        parameters: AbstractContextManager[None] = nullcontext()
        if not self.model.training:
            given = {name: getattr(self.args, f"eval_{name}") for name in ("temperature", "top_p", "top_k")}
            parameters = self._sampling_with(**{name: value for name, value in given.items() if value is not None})
        with self._naming_lost_server(), self._ahead.timing_engine(), parameters:
            generated = super()._generate(prompts)
        if self._stops.differ_from_trls:
            self._correct_trls_metrics(own_lengths(generated), self._cut_off(generated))
        return generated

    def _correct_trls_metrics(self, lengths: Sequence[int], cut_off: Sequence[bool]) -> None:
        """
        Correct TRL's latest metrics of lengths, which count completions that end with a stop as cut off. Collective.
        """
        columns = torch.tensor([lengths, cut_off], device=self.accelerator.device).T.contiguous()
        lengths_B, cut_off_B = self.accelerator.gather(columns).T
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in length_metrics(lengths_B.double(), cut_off_B.bool()).items():
            metrics[name][-1] = value

    def _tool_call_loop(self, *args: Any) -> tuple:
        with getattr(getattr(self, "vllm_generation", None), "tool_turns", nullcontext)():  # ours has it
            return super()._tool_call_loop(*args)

    def _generate_without_scoring(self, prompts: list, num_generations: int) -> None:
        """Run the part of TRL's `_generate` that requests completions, without using the result."""
        prompt_ids, images, fields = self._tokenize_prompts(copy.deepcopy(prompts))
        self._generate_single_turn(prompt_ids, images, fields, num_generations)

    def _generate_for_evaluation(self, prompts: list) -> tuple:
        """Return completions for the prompts of several batches, batch by batch."""
        k = self.num_generations_eval
        # From vLLM's server, TRL requests n completions of every n-th prompt over all processes. So equal prompts must
        # be next to each other, but the rows of a prompt may be divided between two processes.
        with patched(self, num_generations_eval=math.gcd(k, self.args.per_device_eval_batch_size)):
            return self._generate(prompts)

    @contextmanager
    def _sampling_with(self, **parameters: float) -> Iterator[None]:
        """Sample with other parameters than those of training within a block."""
        if self.use_vllm:
            with patched(self.vllm_generation, **parameters):
                yield
            return
        config = copy.deepcopy(self.generation_config)
        config.update(**parameters)
        with patched(self, generation_config=config, generation_kwargs={**self.generation_kwargs, **parameters}):
            try:
                yield
            finally:
                self.model.eval()  # TRL's continuous batching leaves the model in training mode

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Keep an engine awake within a block if it sleeps between calls. Waking it up would push all weights."""
        args = self.args
        if not (self.use_vllm and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode):
            yield
            return
        engine = self.vllm_generation
        # The same steps as those of TRL before a call, so that TRL's next call finds the engine ready.
        engine.sync_weights()
        self._last_loaded_step = self.state.global_step
        engine.llm.wake_up(tags=["kv_cache"])
        engine.enable_sleep_mode = False
        try:
            yield
        finally:
            engine.enable_sleep_mode = True
            engine.llm.sleep(level=2)
            engine._llm_weights_sleeping = True

    # ---- Which completions are cut off ----

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        is_ours = self._initialized and self._stops.differ_from_trls and self.mask_truncated_completions
        if not is_ours or self._round_recording is not None:
            return super()._generate_and_score_completions(inputs)
        # TRL would mask completions that end with a stop.
        with patched(self, mask_truncated_completions=False):
            rollouts = super()._generate_and_score_completions(inputs)
        mask_rows(rollouts, self._rows_cut_off)
        loss_mask = rollouts["completion_mask"] * rollouts.get("tool_mask", 1)
        rollouts["num_items_in_batch"] = self.accelerator.gather(loss_mask.sum()).sum()
        return rollouts

    def _cut_off(self, generated: tuple) -> list[bool]:
        _, completion_ids, tool_mask, *_ = generated
        masks = tool_mask or repeat(None)
        return [self._stops.is_cut_off(ids, mask) for ids, mask in zip(completion_ids, masks, strict=False)]

    # ---- The policy's log-probabilities ----

    def policy_logps(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return the log-probabilities of the rows' completions under the present policy, one array per row."""
        device, pad_token_id = self.accelerator.device, self._tokenizer.pad_token_id
        padded = partial(pad, pad_to_multiple_of=self.pad_to_multiple_of)
        ids = [torch.tensor(row.completion_ids) for row in rows]
        prompt_ids = padded([torch.tensor(row.prompt_ids) for row in rows], pad_token_id, padding_side="left")
        prompt_mask = padded([torch.ones(len(row.prompt_ids)) for row in rows], 0, padding_side="left")
        completion_ids, mask = padded(ids, pad_token_id), padded([torch.ones(len(row)) for row in ids], 0)
        with torch.no_grad():
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([prompt_ids, completion_ids], dim=1).long().to(device),
                torch.cat([prompt_mask, mask], dim=1).long().to(device),
                completion_ids.size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return [row[: len(row_ids)].float().cpu().numpy() for row, row_ids in zip(logps, ids, strict=True)]


def own_lengths(generated: tuple) -> list[int]:
    """Return the number of tokens of each completion that the model generated."""
    _, completion_ids, tool_mask, *_ = generated
    return [sum(mask) for mask in tool_mask] if tool_mask else list(map(len, completion_ids))
