# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Synchronization of LoRA adapters with vLLM: only the adapter is sent, and vLLM keeps the base model that it loaded.

At every sync, TRL merges the adapter into the base model and sends all weights to vLLM. In bfloat16 the merge also
rounds the base weights. [`AdapterGeneration`] replaces TRL's `VLLMGeneration` and sends only the adapter, if vLLM can
serve it separately. A server reads the adapter from a folder that both machines can see, an engine in this process
from a temporary folder.

Each version of the adapter has a name of its own. So the adapter of a request never changes while the request is
processed, and what vLLM caches for a prompt belongs to one version.
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

# The names of our adapters on a server begin with this, like those of TRL's asynchronous trainer.
ADAPTER_NAME = "trl-policy"
# A folder in the output folder. Names that begin with "_" are not pushed to the Hub.
FOLDER_NAME = "_vllm_lora"


def syncing_adapters(args: DAPOConfig) -> AbstractContextManager[None]:
    """Make TRL's trainer create an [`AdapterGeneration`] as its engine, within a block in which it is constructed."""
    engine = partial(
        AdapterGeneration,
        lora_sync=args.vllm_lora_sync,
        output_dir=output_folder(args),
        request_seconds=args.vllm_request_seconds,
    )
    return patched(grpo_trainer, VLLMGeneration=engine)


class AdapterGeneration(vllm_generation.VLLMGeneration):
    """TRL's engine, [`~trl.generation.vllm_generation.VLLMGeneration`], which may be sent only the adapter."""

    vllm_client: AdapterClient
    _adapter_request: Any  # vLLM's `LoRARequest`

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *args: Any,
        lora_sync: str | None,  # the setting `vllm_lora_sync`
        output_dir: str,  # the run's output folder, in which a server finds the adapters
        request_seconds: float | None = None,  # maximum time that a server may take to load an adapter
        **kwargs: Any,
    ) -> None:
        self.lora_sync, self._request_seconds = lora_sync, request_seconds
        self.serves_adapter = False
        self.why_merged = ""  # why it sends merged weights, if it does not serve the adapter
        self._adapter_dtype: torch.dtype | None = None  # the type in which vLLM stores adapters
        self.adapter_version = 0  # version of the adapter that vLLM samples with; 0 before the first one
        # A server may have adapters of earlier runs, so the names must differ from run to run.
        self._run = uuid.uuid4().hex[:8]
        adapted = as_peft(model)
        self._adapter = "" if adapted is None else adapted.active_adapters[0]
        self._adapter_root = Path(output_dir).absolute() / FOLDER_NAME
        super().__init__(model, *args, **kwargs)

    # ---- The choice between adapter and merged weights ----

    def _init_vllm(self) -> None:
        if not vllm_generation.is_vllm_available():
            super()._init_vllm()  # raises an error with instructions
        why = self._why_merged()
        if why is None and self.mode == "server":
            with self._using_client(AdapterClient):
                super()._init_vllm()
            why, self._adapter_dtype = on_main_process(self._check_server)
            if why is None:
                why = on_main_process(self._why_refused, self._gather_adapter())
            self.serves_adapter = why is None
            if why is not None:  # only then the server must join the group in which TRL pushes weights
                self._fall_back_to_merging(why)
                on_main_process(self._join_group, why)
        elif why is None:
            self.serves_adapter = True
            with patched(vllm_generation, LLM=partial(self._make_engine, vllm_generation.LLM)):
                super()._init_vllm()
        else:
            self._fall_back_to_merging(why)
            with self._using_client(BoundClient):
                super()._init_vllm()
        if self.serves_adapter:
            size = f"{self._adapter_size / 2**20:.3g} MiB"
            self.accelerator.print(
                f"vLLM keeps the base model, and only the LoRA adapter is sent to it: {size} per rollout."
            )

    def _why_merged(self) -> str | None:
        """Return why merged weights must be sent, if that is known before vLLM starts."""
        if self.lora_sync == "merge":
            return "`vllm_lora_sync='merge'` is set"
        if self._dist.fsdp_version == 1:
            return "FSDP1 cannot gather only an adapter (FSDP2 can)"
        if (why := why_not_served(self.model)) is not None:
            return why
        if (name := on_main_process(changed_weight, self.model)) is not None:
            return (
                f"`{name}` differs from {self.model.name_or_path}, from which vLLM loads the base model (save the "
                "model, and train from the saved one)"
            )
        return None

    def _fall_back_to_merging(self, why: str) -> None:
        """
        Use merged weights. Raise if the user required the adapter or if merged weights cannot be sent, and warn if the
        adapter would have been the default.
        """
        self.why_merged = why
        if self.lora_sync == "adapter":
            raise ValueError(
                f"`vllm_lora_sync='adapter'` is not possible, because {why}. Change that, or set it to `None` to send "
                "merged weights."
            )
        if is_peft_model(self.model) and is_quantized(self.model):
            raise ValueError(
                "vLLM does not accept weights that are merged into a quantized model, and only sending the adapter is "
                f"not possible, because {why}. Change that, load the model without quantization, or set "
                "`use_vllm=False`."
            )
        if is_peft_model(self.model) and self.lora_sync is None and self.accelerator.is_main_process:
            logger.warning(f"At every sync all weights, with the adapter merged in, are sent to vLLM, because {why}.")

    # ---- In this process ----

    def _make_engine(self, make: Callable, **kwargs: Any) -> Any:
        """Make TRL's engine with LoRA enabled, so that every request uses the present adapter."""
        rank = max_lora_rank(self._adapter_config.r)
        # If the trainer's model is quantized, TRL quantizes vLLM's too. Without this, vLLM keeps the format of the
        # checkpoint, which samples faster.
        self.llm = llm = make(**{**kwargs, "enable_lora": True, "max_lora_rank": rank, "quantization": None})
        self._adapter_request, self._adapter_dtype = None, llm.llm_engine.vllm_config.lora_config.lora_dtype
        llm.generate, llm.chat = self._with_adapter(llm.generate), self._with_adapter(llm.chat)
        # TRL uses level 2, which discards the weights, because it sends all of them again. Here the base model is not
        # sent again, so it must be kept.
        llm.sleep = partial(lambda sleep, level: sleep(level=1), llm.sleep)
        self._folder = tempfile.TemporaryDirectory(prefix="vllm_lora_")
        self._adapter_root = Path(self._folder.name)
        try:
            self._load(self._gather_adapter())
        except ValueError as error:  # vLLM raises it for layers that it cannot adapt
            raise ValueError(
                f"vLLM cannot load the adapter ({error}). Set `vllm_lora_sync='merge'`, or change the adapter's "
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

    def _using_client(self, client: type) -> AbstractContextManager[None]:
        """Make TRL create a client that also inherits from `client`, within a block in which TRL sets up vLLM."""
        if self.mode != "server":
            return nullcontext()
        text = self.model.config.get_text_config()
        facts = {"request_seconds": self._request_seconds, "vocab_size": text.vocab_size}
        return patched(vllm_generation, VLLMClient=type(client.__name__, (client, vllm_generation.VLLMClient), facts))

    def _join_group(self, why: str) -> None:
        try:
            BoundClient.init_communicator(
                self.vllm_client, self.accelerator.device
            )  # that of AdapterClient does nothing
        except Exception as error:
            raise RuntimeError(
                f"The vLLM server can neither serve the adapter, because {why}, nor receive merged weights: {error}. "
                "Fix one of the two, and start again."
            ) from error

    def _check_server(self) -> tuple[str | None, torch.dtype | None]:
        """Return why the server cannot serve the adapter, or `None`, and the dtype in which it would serve it."""
        client, rank, why = self.vllm_client, self._adapter_config.r, None
        started = client.server_config()
        lora = started["lora_config"]
        enable = f"Restart it with `--enable-lora --max-lora-rank {max_lora_rank(rank)}`"
        if lora is None:
            why = f"does not serve adapters. {enable}"
        elif lora["max_lora_rank"] < rank:
            why = f"serves adapters up to rank {lora['max_lora_rank']}, but this one has rank {rank}. {enable}"
        elif lora.get("target_modules"):  # it would silently ignore the other modules
            why = f"only adapts {', '.join(lora['target_modules'])}. Restart it without `--lora-target-modules`"
        elif (replicas := started["parallel_config"]["data_parallel_size"]) > 1:
            why = (
                f"has {replicas} replicas, of which only one would load the adapter. Restart it without "
                "`--data-parallel-size`"
            )
        if why is not None:
            return f"the vLLM server at {without_secrets(client.base_url)} {why}", None
        base, checkpoint = started["model_config"]["model"], self.model.name_or_path
        if base != checkpoint:
            logger.warning(
                f"The base model of the vLLM server is {base}, and that of the trainer is {checkpoint}. Make sure "
                "that both are the same weights, since only the adapter is sent to the server."
            )
        return None, getattr(torch, lora["lora_dtype"].removeprefix("torch."))

    def _why_refused(self, state_dict: dict[str, Tensor]) -> str | None:
        """Send the present adapter to the server. Return why the server refuses it, or `None`."""
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
        # vLLM converts the adapter to its own dtype. Converting it here halves the bytes to send.
        state_dict = gather_adapter(cast(PeftModel, self.model), self._adapter, self._dist, self._adapter_dtype)
        self._adapter_size = sum(value.nbytes for value in state_dict.values())
        return state_dict

    def _save_next(self, state_dict: dict[str, Tensor]) -> tuple[str, Path]:
        """Write the next version of the adapter to a folder of its own. Return its name and the folder."""
        self.adapter_version += 1
        name = f"{ADAPTER_NAME}-{self._run}-v{self.adapter_version}"
        path = self._adapter_root / name
        path.mkdir(parents=True)
        save_file(state_dict, path / "adapter_model.safetensors", metadata={"format": "pt"})
        self._adapter_config.save_pretrained(str(path))
        return name, path

    # ---- Methods that TRL calls ----

    def sync_weights(self) -> None:
        """Send the adapter to vLLM, or all weights as TRL does."""
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
        """
        Generate as TRL does. In addition, a sleeping engine is woken up first, and processes may request different
        numbers of completions, or none.
        """
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
        """
        Run TRL's turns after tool calls within a block. A process that has finished keeps taking part in requests
        until no process has a tool call any more.
        """
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
