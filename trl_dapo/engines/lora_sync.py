# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Sending a LoRA adapter to vLLM, while the base model stays as vLLM loaded it.

TRL merges the adapter into the base and hands vLLM the whole model at every sync, which in bfloat16 also moves the
base by what rounding loses. [`AdapterGeneration`] replaces TRL's `VLLMGeneration` and sends only the adapter if vLLM
can serve it. A server reads it from a folder that both can access; an engine in this process reads it from a folder of
its own. The adapter has a new name each time, so it cannot change during a request, and what vLLM caches of a prompt
belongs to one adapter.
"""

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from ..config import DAPOConfig
from ..construction import is_quantized
from ..ranks import on_main_process
from ..run.checkpoint import output_folder
from ..settings.secrets import without_secrets
from ..update.patching import patched
from .lora_adapters import as_peft, changed_weight, gather_adapter, max_lora_rank, why_not_served
from .lora_client import AdapterClient, AdapterRefused
from .server import BoundClient


logger = logging.get_logger(__name__)

# The names of our adapters on the server begin with this, like those of TRL's asynchronous trainer.
ADAPTER_NAME = "trl-policy"
# Under the output folder. What begins with "_" is not pushed to the Hub.
FOLDER_NAME = "_vllm_lora"


def syncing_adapters(args: DAPOConfig) -> AbstractContextManager[None]:
    """For the time of TRL's construction, the engine that it makes is an [`AdapterGeneration`]."""
    engine = partial(
        AdapterGeneration,
        lora_sync=args.vllm_lora_sync,
        output_dir=output_folder(args),
        request_seconds=args.vllm_request_seconds,
    )
    return patched(grpo_trainer, VLLMGeneration=engine)


class AdapterGeneration(vllm_generation.VLLMGeneration):
    """TRL's engine, [`~trl.generation.vllm_generation.VLLMGeneration`], which may be handed the adapter alone."""

    vllm_client: AdapterClient
    _adapter_request: Any  # vLLM's `LoRARequest`

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *args: Any,
        lora_sync: str | None,  # the setting
        output_dir: str,  # of the run, from which a server reads the adapters
        request_seconds: float | None = None,  # that it may take to load one
        **kwargs: Any,
    ) -> None:
        self.lora_sync, self._request_seconds = lora_sync, request_seconds
        self.serves_adapter = False
        self.why_merged = ""  # where it does not
        self._adapter_dtype: torch.dtype | None = None  # vLLM's
        self.adapter_version = 0  # of the adapter that requests are answered with; 0: none yet
        # A server outlives the run that loaded an adapter: names of two runs must differ.
        self._run = uuid.uuid4().hex[:8]
        adapted = as_peft(model)
        self._adapter = "" if adapted is None else adapted.active_adapters[0]
        self._adapter_root = Path(output_dir).absolute() / FOLDER_NAME
        super().__init__(model, *args, **kwargs)

    # ---- Which way the weights go ----

    def _init_vllm(self) -> None:
        if not vllm_generation.is_vllm_available():
            super()._init_vllm()  # says so
        why = self._why_merged()
        if why is None and self.mode == "server":
            with self._asking_by(AdapterClient):
                super()._init_vllm()
            why, self._adapter_dtype = on_main_process(self._ask_server)
            if why is None:
                why = on_main_process(self._why_refused, self._gather_adapter())
            self.serves_adapter = why is None
            if why is not None:  # else the server joins no group of TRL's weight sync
                self._agree_to_merge(why)
                on_main_process(self._join_group, why)
        elif why is None:
            self.serves_adapter = True
            with patched(vllm_generation, LLM=partial(self._make_engine, vllm_generation.LLM)):
                super()._init_vllm()
        else:
            self._agree_to_merge(why)
            with self._asking_by(BoundClient):
                super()._init_vllm()
        if self.serves_adapter:
            self.accelerator.print(
                f"vLLM keeps the base and gets the LoRA adapter alone: {self._adapter_size / 2**20:.3g} MiB a rollout."
            )

    def _why_merged(self) -> str | None:
        """Facts that are known before vLLM is started."""
        if self.lora_sync == "merge":
            return "`vllm_lora_sync='merge'` says so"
        if self._dist.fsdp_version == 1:
            return "FSDP1 does not hand out an adapter by itself (FSDP2 does)"
        if (why := why_not_served(self.model)) is not None:
            return why
        if (name := on_main_process(changed_weight, self.model)) is not None:
            return (
                f"`{name}` is not what {self.model.name_or_path} has, which vLLM loads (save the model, and name that)"
            )
        return None

    def _agree_to_merge(self, why: str) -> None:
        """Refuses where an adapter was asked for, or merged weights cannot travel; warns where one was expected to."""
        self.why_merged = why
        if self.lora_sync == "adapter":
            raise ValueError(
                f"`vllm_lora_sync='adapter'` cannot be honoured, because {why}. Change that, or leave it `None` for "
                "merged weights."
            )
        if is_peft_model(self.model) and is_quantized(self.model):
            raise ValueError(
                "vLLM takes no weights merged into a quantized base, and cannot get the adapter of a quantized model "
                f"alone, because {why}. Change that, load the model without quantization, or set `use_vllm=False`."
            )
        if is_peft_model(self.model) and self.lora_sync is None and self.accelerator.is_main_process:
            logger.warning(f"At every sync vLLM gets all weights, with the adapter merged into them, because {why}.")

    # ---- In this process ----

    def _make_engine(self, make: Callable, **kwargs: Any) -> Any:
        """TRL's engine, with LoRA; every request that it is given carries the present adapter."""
        rank = max_lora_rank(self._adapter_config.r)
        # TRL is_client for a quantized base where the trainer's is. The checkpoint's own form samples faster.
        self.llm = llm = make(**{**kwargs, "enable_lora": True, "max_lora_rank": rank, "quantization": None})
        self._adapter_request, self._adapter_dtype = None, llm.llm_engine.vllm_config.lora_config.lora_dtype
        llm.generate, llm.chat = self._with_adapter(llm.generate), self._with_adapter(llm.chat)
        # TRL's level 2 throws the weights away, since it hands all of them over again. Nobody else has the base.
        llm.sleep = partial(lambda sleep, level: sleep(level=1), llm.sleep)
        self._folder = tempfile.TemporaryDirectory(prefix="vllm_lora_")
        self._adapter_root = Path(self._folder.name)
        try:
            self._load(self._gather_adapter())
        except ValueError as error:  # vLLM's, for a layer that it does not adapt
            raise ValueError(
                f"vLLM does not take the adapter ({error}). Set `vllm_lora_sync='merge'`, or change its "
                "`target_modules`."
            ) from error
        return llm

    def _with_adapter(self, method: Callable) -> Callable:
        @wraps(method)
        def carrying(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **{"lora_request": self._adapter_request, **kwargs})

        return carrying

    def _load(self, state_dict: dict[str, Tensor]) -> None:
        from vllm.lora.request import LoRARequest  # comes with vLLM

        last, (name, path) = self._adapter_request, self._save_next(state_dict)
        if last is not None:
            self.llm.llm_engine.remove_lora(last.lora_int_id)
            shutil.rmtree(last.lora_path)
        request = LoRARequest(name, self.adapter_version, str(path))
        self.llm.llm_engine.add_lora(request)
        self._adapter_request = request

    # ---- On a server ----

    def _asking_by(self, client: type) -> AbstractContextManager[None]:
        """For the time of TRL's construction, the client that it makes is also one of ours."""
        if self.mode != "server":
            return nullcontext()
        text = self.model.config.get_text_config()
        facts = {"request_seconds": self._request_seconds, "vocab_size": text.vocab_size}
        return patched(vllm_generation, VLLMClient=type(client.__name__, (client, vllm_generation.VLLMClient), facts))

    def _join_group(self, why: str) -> None:
        try:
            BoundClient.init_communicator(self.vllm_client, self.accelerator.device)  # ours joins none
        except Exception as error:
            raise RuntimeError(
                f"The server cannot get the adapter alone, because {why}. It takes no merged weights either: {error}"
            ) from error

    def _ask_server(self) -> tuple[str | None, torch.dtype | None]:
        """Return why the server cannot serve the adapter, and the dtype in which it would serve it."""
        client, rank, why = self.vllm_client, self._adapter_config.r, None
        started = client.server_config()
        lora = started["lora_config"]
        enable = f"Restart it with `--enable-lora --max-lora-rank {max_lora_rank(rank)}`"
        if lora is None:
            why = f"serves no adapters. {enable}"
        elif lora["max_lora_rank"] < rank:
            why = f"serves adapters up to rank {lora['max_lora_rank']}, and this one has rank {rank}. {enable}"
        elif lora.get("target_modules"):  # it would leave out the others without a word
            why = f"adapts {', '.join(lora['target_modules'])} alone. Restart it without `--lora-target-modules`"
        elif (replicas := started["parallel_config"]["data_parallel_size"]) > 1:
            why = f"has {replicas} replicas, of which one would get it. Restart it without `--data-parallel-size`"
        if why is not None:
            return f"the vLLM server at {without_secrets(client.base_url)} {why}", None
        base, checkpoint = started["model_config"]["model"], self.model.name_or_path
        if base != checkpoint:
            logger.warning(
                f"The vLLM server's base is {base}, the trainer's {checkpoint}. They must be the same weights: only "
                "the adapter is handed over."
            )
        return None, getattr(torch, lora["lora_dtype"].removeprefix("torch."))

    def _why_refused(self, state_dict: dict[str, Tensor]) -> str | None:
        """Write the adapter to a folder and make the server load it. The server may have no access to that folder."""
        self.vllm_client.clear(self._adapter_root)
        try:
            self._serve(state_dict)
        except AdapterRefused as error:
            shutil.rmtree(self._adapter_root)
            return f"the vLLM server at {without_secrets(self.vllm_client.base_url)} {error}"
        return None

    def _serve(self, state_dict: dict[str, Tensor]) -> None:
        name, path = self._save_next(state_dict)
        self.vllm_client.serve_adapter(name, path)

    # ---- The adapter ----

    @property
    def _adapter_config(self) -> LoraConfig:
        return cast(LoraConfig, cast(PeftModel, self.model).peft_config[self._adapter])

    def _gather_adapter(self) -> dict[str, Tensor]:
        # vLLM rounds what it loads to its own dtype. Rounded before, it is half as many bytes to move.
        state_dict = gather_adapter(cast(PeftModel, self.model), self._adapter, self._dist, self._adapter_dtype)
        self._adapter_size = sum(value.nbytes for value in state_dict.values())
        return state_dict

    def _save_next(self, state_dict: dict[str, Tensor]) -> tuple[str, Path]:
        """Writes the next version to a folder of its own; returns its name and the folder."""
        self.adapter_version += 1
        name = f"{ADAPTER_NAME}-{self._run}-v{self.adapter_version}"
        path = self._adapter_root / name
        path.mkdir(parents=True)
        save_file(state_dict, path / "adapter_model.safetensors", metadata={"format": "pt"})
        self._adapter_config.save_pretrained(str(path))
        return name, path

    # ---- What TRL calls ----

    def sync_weights(self) -> None:
        """Hands vLLM what was trained: the adapter, or as TRL does all weights."""
        if not self.serves_adapter:
            super().sync_weights()
            return
        self._wake_weights()
        state_dict = self._gather_adapter()
        if self.mode == "server":
            on_main_process(self._serve, state_dict)
        else:
            self._load(state_dict)

    def generate(self, prompts: list, images: list | None, num_generations: int, profiler: Any = None) -> tuple:
        """As in TRL, but an engine that slept has its weights, and ranks may request different numbers, or nothing."""
        if self.serves_adapter:
            self._wake_weights()
        sizes = gather_object([len(prompts)]) if self.mode == "server" else [len(prompts)]
        if len({*sizes}) == 1:
            return super().generate(prompts, images, num_generations, profiler) if prompts else ()
        own_images = images or [None] * len(prompts)
        rows = gather_object(list(zip(prompts, own_images, strict=True)))
        if not self.accelerator.is_main_process:
            rows = []
        all_prompts, all_images = [prompt for prompt, _ in rows], [image for _, image in rows]
        (whole,) = broadcast_object_list([super().generate(all_prompts, all_images, num_generations, profiler)])
        first = sum(sizes[: self.accelerator.process_index])
        stop = first + len(prompts)
        return tuple(column[first:stop] if column else column for column in whole)

    @contextmanager
    def tool_turns(self) -> Iterator[None]:
        """A block of TRL's turns behind tool calls, which ends on every rank when no rank has a call any more."""
        is_client = self.mode == "server" and self.accelerator.is_main_process
        with patched(self.vllm_client, in_tool_turns=True) if is_client else nullcontext():
            yield
            while self.mode == "server" and self.generate([], None, 1):
                pass

    def _wake_weights(self) -> None:
        if self.mode == "colocate" and self._llm_weights_sleeping:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
