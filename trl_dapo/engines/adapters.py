# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""How vLLM gets what LoRA trains: the adapter travels, and the base stays as vLLM loaded it.

TRL merges the adapter into the base and hands vLLM the whole model at every sync, which in bfloat16 also moves the
base by what rounding loses. [`AdapterGeneration`] stands in for TRL's `VLLMGeneration` and hands over the adapter
alone where vLLM can serve it. A server reads it from a folder that both see, under a new name each time; an engine in
this process from a folder of its own. Either way no request ever meets an adapter that changes under it, and what vLLM
keeps of a prompt belongs to one adapter.
"""

import atexit
import contextlib
import json
import shutil
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from peft import LoraConfig, PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import cached_file, logging
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from ..run.checkpoint import output_folder


if TYPE_CHECKING:
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_client import VLLMClient as ClientBase
    from vllm.lora.request import LoRARequest

    from ..config import DAPOConfig
else:
    ClientBase = object  # TRL's client, once this is mixed into its class


logger = logging.get_logger(__name__)

# Of the server's adapters ours begin with this, as those of TRL's asynchronous trainer do.
ADAPTER_NAME = "trl-policy"
# Under the output folder. What begins with "_" is not pushed to the Hub.
FOLDER_NAME = "_vllm_lora"
# What vLLM takes for `max_lora_rank`: a capacity, in which an adapter of lower rank is served as well.
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

# Fields of a LoRA config that vLLM reads, and those that change no more than where and how the adapter trains. Any
# other that is set means weights which vLLM would leave out, or scale otherwise, without a word.
_SERVED_FIELDS = {
    *("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "init_lora_weights", "eva_config", "inference_mode", "runtime_config", "megatron_core"),
    *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
}
# The others take from the base what they put into the adapter, while vLLM's base is the checkpoint's.
_INITS_THAT_LEAVE_THE_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")


def _as_peft(model: PreTrainedModel | PeftModel) -> PeftModel | None:
    return cast(PeftModel, model) if is_peft_model(model) else None


def why_not_served(model: PreTrainedModel | PeftModel) -> str | None:
    """
    What keeps vLLM from serving a model's adapter apart from its base.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            To be trained.

    Returns:
        `str`, the end of a sentence that begins with "because", or `None` where vLLM can serve it.
    """
    adapted = _as_peft(model)
    if adapted is None:
        return "the model has no adapter"
    if len(adapted.active_adapters) != 1:
        return f"{len(adapted.active_adapters)} adapters are active ({', '.join(adapted.active_adapters)})"
    name = adapted.active_adapters[0]
    config = adapted.peft_config[name]
    if config.peft_type != PeftType.LORA or not isinstance(config, LoraConfig):
        return f"the adapter is {PeftType(config.peft_type).value}, not LoRA"
    default = LoraConfig()
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in _SERVED_FIELDS and value != getattr(default, field.name):
            return f"vLLM knows no `{field.name}={value!r}`"
    if config.init_lora_weights not in _INITS_THAT_LEAVE_THE_BASE:
        return f"`init_lora_weights={config.init_lora_weights!r}` changes the base, of which vLLM has the checkpoint's"
    if config.r > MAX_LORA_RANKS[-1]:
        return f"its rank of {config.r} is above vLLM's largest, {MAX_LORA_RANKS[-1]}"
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(isinstance(layer, BaseTunerLayer) for layer in ends):
        return "it adapts the embedding or the head, which vLLM serves in part"
    if model.config.get_text_config() is not model.config:
        return "of a model with images vLLM adapts only a part"
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if others := [parameter for parameter in trained if f".{name}" not in parameter or "lora_" not in parameter]:
        return f"weights beside the adapter are trained ({others[0]})"
    return None


def changed_weight(model: PeftModel) -> str | None:
    """
    A weight under a model's adapter that is not what the checkpoint has, which is what vLLM loads.

    Weights that cannot be compared are passed over: quantized and sharded ones, and those that transformers holds in
    another form than the checkpoint.

    Args:
        model ([`~peft.PeftModel`]):
            Whose `name_or_path` says where its checkpoint is.

    Returns:
        `str`, the weight's name, or `None`.
    """
    weights = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter.detach()
        for name, parameter in model.named_parameters()
        if "lora_" not in name and type(parameter) is torch.nn.Parameter and parameter.numel()
    }
    for path in _checkpoint_files(model.name_or_path):
        with safe_open(path, framework="pt") as file:
            for name in sorted(weights.keys() & file.keys()):
                stored, weight = file.get_slice(name), weights[name]
                if stored.get_dtype() not in ("F32", "F16", "BF16") or not weight.ndim:
                    continue
                # What was merged or trained into a weight shows in any of its rows.
                if tuple(stored.get_shape()) != weight.shape or not torch.equal(
                    stored[:1].to(weight.dtype), weight[:1].cpu()
                ):
                    return name
    return None


def _checkpoint_files(name_or_path: str) -> list[str]:
    """Of a checkpoint that transformers has loaded before; none where there is none, or in another format."""
    if not name_or_path:
        return []
    find = partial(cached_file, name_or_path, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    if whole := find("model.safetensors"):
        return [whole]
    if (index := find("model.safetensors.index.json")) is None:
        return []
    names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    return [path for path in map(find, names) if path is not None]


def max_lora_rank(rank: int) -> int:
    """The smallest capacity of vLLM's that holds an adapter of this rank."""
    return next(size for size in MAX_LORA_RANKS if size >= rank)


def gather_adapter(
    model: PeftModel, adapter: str, dist: "DistributedBackend", dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """
    An adapter's whole weights, on the CPU, named as peft saves them. Every process must call it, and gets them.

    Args:
        model ([`~peft.PeftModel`]):
            Whole, or sharded by FSDP2 or ZeRO-3.
        adapter (`str`):
            Its name.
        dist (`trl.distributed.DistributedBackend`):
            What shards the model.
        dtype (`torch.dtype`, *optional*):
            To round them to. Defaults to what they are trained in.

    Returns:
        `dict[str, torch.Tensor]`.
    """
    parameters = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name and f".{adapter}." in name
    }
    with dist.gather_params(list(parameters.values())):
        whole = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().to("cpu", dtype, copy=True)
            for name, value in parameters.items()
        }
    return get_peft_model_state_dict(model, state_dict=whole, adapter_name=adapter, save_embedding_layers=False)


@contextmanager
def making_the_engine(args: "DAPOConfig") -> Iterator[None]:
    """For the time of TRL's construction, the engine that it makes is an [`AdapterGeneration`]."""
    engine = partial(
        AdapterGeneration,
        lora_sync=args.vllm_lora_sync,
        output_dir=output_folder(args),
        request_seconds=args.vllm_request_seconds,
    )
    with _rebound(grpo_trainer, VLLMGeneration=engine):
        yield


@contextmanager
def _rebound(module: ModuleType, **names: Any) -> Iterator[None]:
    usual = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(usual)


class AdapterGeneration(vllm_generation.VLLMGeneration):
    """
    TRL's [`~trl.generation.vllm_generation.VLLMGeneration`], which hands vLLM the adapter alone where it can serve it.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            As in TRL.
        *args, **kwargs:
            As in TRL.
        lora_sync (`str`, *optional*):
            `"adapter"`, `"merge"`, or `None` for the first where vLLM can serve the adapter, else the second.
        output_dir (`str`):
            The run's, which a server reads the adapters from.
        request_seconds (`float`, *optional*):
            That a server may take to load an adapter. Defaults to no limit.

    Raises:
        ValueError: If `lora_sync="adapter"` cannot be honoured, or the adapter of a quantized model cannot travel.
    """

    vllm_client: "AdapterClient"
    _adapter_request: "LoRARequest | None"

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *args: Any,
        lora_sync: str | None,
        output_dir: str,
        request_seconds: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.lora_sync = lora_sync
        self._request_seconds = request_seconds
        self.serves_adapter = False
        self._adapter_dtype: torch.dtype | None = None  # vLLM's
        self.adapter_version = 0  # of the adapter that requests are answered with; 0: none yet
        # A server outlives the run that loaded an adapter: names of two runs must differ.
        self._run = uuid.uuid4().hex[:8]
        adapted = _as_peft(model)
        self._adapter = "" if adapted is None else adapted.active_adapters[0]
        self._adapter_root = Path(output_dir).absolute() / FOLDER_NAME
        super().__init__(model, *args, **kwargs)

    # ---- Which way the weights go ----

    def _init_vllm(self) -> None:
        if not vllm_generation.is_vllm_available():
            super()._init_vllm()  # says so
        why = self._why_merged()
        if why is None and self.mode == "server":
            why = self._connect()
        elif why is None:
            self.serves_adapter = True
            with _rebound(vllm_generation, LLM=partial(self._make_engine, vllm_generation.LLM)):
                super()._init_vllm()
        else:
            self._merge_because(why)
            super()._init_vllm()
        if self.serves_adapter:
            self.accelerator.print(
                f"vLLM keeps the base, and is handed the LoRA adapter alone: {self._adapter_size / 2**20:.3g} MiB a "
                "rollout."
            )

    def _why_merged(self) -> str | None:
        """What is known before vLLM is asked."""
        if self.lora_sync == "merge":
            return "`vllm_lora_sync='merge'` says so"
        if self._dist.fsdp_version == 1:
            return "FSDP1 does not hand out an adapter by itself (FSDP2 does)"
        if (why := why_not_served(self.model)) is not None:
            return why
        if (name := self._on_main_process(changed_weight, self.model)) is not None:
            return (
                f"`{name}` is not what {self.model.name_or_path} has, which vLLM loads (save the model, and name that)"
            )
        return None

    def _merge_because(self, why: str) -> None:
        """Lets TRL merge, and says so where an adapter would have been expected to travel; or refuses."""
        if self.lora_sync == "adapter":
            raise ValueError(
                f"`vllm_lora_sync='adapter'` cannot be honoured, because {why}. Change that, or leave it `None` for "
                "merged weights."
            )
        if not is_peft_model(self.model):
            return
        if getattr(self.model, "is_loaded_in_4bit", False) or getattr(self.model, "is_loaded_in_8bit", False):
            raise ValueError(
                "Weights merged into a quantized base cannot be handed to vLLM, and the adapter of a quantized model "
                f"cannot travel by itself, because {why}. Or load the model without quantization, or set "
                "`use_vllm=False`."
            )
        if self.lora_sync is None and self.accelerator.is_main_process:
            logger.warning(f"At every sync the adapter is merged and vLLM is handed all weights, because {why}.")

    # ---- In this process ----

    def _make_engine(self, make: Callable, **kwargs: Any) -> Any:
        """TRL's engine, with LoRA; every request that it is given carries the present adapter."""
        rank = max_lora_rank(self._adapter_config.r)
        # TRL asks for a quantized base where the trainer's is. The checkpoint's own form samples faster.
        self.llm = llm = make(**{**kwargs, "enable_lora": True, "max_lora_rank": rank, "quantization": None})
        self._adapter_request, self._adapter_dtype = None, llm.llm_engine.vllm_config.lora_config.lora_dtype
        llm.generate, llm.chat = self._with_adapter(llm.generate), self._with_adapter(llm.chat)
        # TRL's level 2 throws the weights away, since it hands all of them over again. Nobody else has the base.
        llm.sleep = partial(_sleep_with_weights, llm.sleep)
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

    def _load(self, state_dict: dict[str, torch.Tensor]) -> None:
        from vllm.lora.request import LoRARequest  # comes with vLLM

        last, (name, path) = self._adapter_request, self._save_next(state_dict)
        if last is not None:
            self.llm.llm_engine.remove_lora(last.lora_int_id)
            shutil.rmtree(last.lora_path)
        request = LoRARequest(name, self.adapter_version, str(path))
        self.llm.llm_engine.add_lora(request)
        self._adapter_request = request

    # ---- On a server ----

    def _connect(self) -> str | None:
        """Connects to the server, and takes it into the group of TRL's weight sync only if weights must be merged."""
        settings = {"request_seconds": self._request_seconds}
        client = type("AdapterClient", (AdapterClient, vllm_generation.VLLMClient), settings)
        with _rebound(vllm_generation, VLLMClient=client):
            super()._init_vllm()
        why, self._adapter_dtype = self._on_main_process(self._ask_server)
        if why is None:
            why = self._on_main_process(self._why_refused, self._gather_adapter())
        self.serves_adapter = why is None
        if why is not None:
            self._merge_because(why)
            self._on_main_process(lambda: self.vllm_client.join_group(self.accelerator.device))
        return why

    def _ask_server(self) -> tuple[str | None, torch.dtype | None]:
        """What keeps the server from serving the adapter, and the dtype that it would serve it in."""
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
            return f"the vLLM server at {client.base_url} {why}", None
        base, checkpoint = started["model_config"]["model"], self.model.name_or_path
        if base != checkpoint:
            logger.warning(
                f"The vLLM server's base is {base}, the trainer's {checkpoint}. They must be the same weights: only "
                "the adapter is handed over."
            )
        return None, getattr(torch, lora["lora_dtype"].removeprefix("torch."))

    def _why_refused(self, state_dict: dict[str, torch.Tensor]) -> str | None:
        """Hands the server the adapter as it is, in a folder that it may not see."""
        shutil.rmtree(self._adapter_root, ignore_errors=True)  # of a run that was killed
        try:
            self._serve(state_dict)
        except AdapterRefused as error:
            shutil.rmtree(self._adapter_root)
            return str(error)
        return None

    def _serve(self, state_dict: dict[str, torch.Tensor]) -> None:
        name, path = self._save_next(state_dict)
        self.vllm_client.serve_adapter(name, path)

    def _on_main_process(self, function: Callable, *args: Any) -> Any:
        """What `function` returns on the main process, on every process; an error there is one everywhere."""
        outcome: list[Any] = [None, None]
        error = None
        if self.accelerator.is_main_process:
            try:
                outcome[0] = function(*args)
            except Exception as exc:
                error, outcome[1] = exc, f"{type(exc).__name__}: {exc}"
        broadcast_object_list(outcome, from_process=0)
        if error is not None:
            raise error
        if outcome[1] is not None:
            raise RuntimeError(f"On the main process: {outcome[1]}")
        return outcome[0]

    # ---- The adapter ----

    @property
    def _peft_model(self) -> PeftModel:
        adapted = _as_peft(self.model)
        assert adapted is not None
        return adapted

    @property
    def _adapter_config(self) -> LoraConfig:
        config = self._peft_model.peft_config[self._adapter]
        assert isinstance(config, LoraConfig)
        return config

    def _gather_adapter(self) -> dict[str, torch.Tensor]:
        # vLLM rounds what it loads to its own dtype. Rounded before, it is half as many bytes to move.
        state_dict = gather_adapter(self._peft_model, self._adapter, self._dist, self._adapter_dtype)
        self._adapter_size = sum(value.nbytes for value in state_dict.values())
        return state_dict

    def _save_next(self, state_dict: dict[str, torch.Tensor]) -> tuple[str, Path]:
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
            self._on_main_process(self._serve, state_dict)
        else:
            self._load(state_dict)

    def generate(self, *args: Any, **kwargs: Any) -> tuple:
        """As in TRL, whose engine is handed the weights again where it slept; here it still has them."""
        if self.serves_adapter:
            self._wake_weights()
        return super().generate(*args, **kwargs)

    def _wake_weights(self) -> None:
        if self.mode == "colocate" and self._llm_weights_sleeping:
            vllm_generation.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False


def _sleep_with_weights(sleep: Callable, level: int) -> None:
    sleep(level=1)


class AdapterRefused(Exception):
    """The server's answer to an adapter that it could not load, with what to do about it."""


class AdapterClient(ClientBase):
    """
    What a [`~trl.generation.vllm_client.VLLMClient`] needs beside it to ask for an adapter: mixed into its class.

    Requests name the adapter that was served last. One that was asked for before stays on the server until no request
    names it any more, so that a rollout in flight ends with the adapter it began with.

    Attributes:
        request_seconds (`float`, *optional*):
            That the server may take to load an adapter, or to say how it was started.
    """

    request_seconds: float | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._in_flight: Counter[str | None] = Counter()  # requests that name an adapter
        self._adapters: dict[str, Path] = {}  # on the server, by name
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)
        atexit.register(self._leave)

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Joins no group: an adapter needs none."""

    def join_group(self, device: torch.device | str | int) -> None:
        """As TRL's client does at once: for weights that are merged."""
        super().init_communicator(device)

    def server_config(self) -> dict:
        """What the server was started with."""
        url = f"{self.base_url}/server_info"
        response = self.session.get(url, params={"config_format": "json"}, timeout=self.request_seconds)
        if response.status_code == 404:
            raise RuntimeError(
                f"The vLLM server at {self.base_url} does not say how it was started. Restart it with "
                "`VLLM_SERVER_DEV_MODE=1` in its environment."
            )
        response.raise_for_status()
        return response.json()["vllm_config"]

    def serve_adapter(self, name: str, path: Path) -> None:
        """Loads an adapter and asks for it from now on."""
        import requests  # comes with vLLM

        # Not through the session, which would try again what the server answered with an error, and then lose it.
        url = f"{self.base_url}/v1/load_lora_adapter"
        response = requests.post(url, json={"lora_name": name, "lora_path": str(path)}, timeout=self.request_seconds)
        if response.status_code == 404 and name not in response.text:
            raise AdapterRefused(
                f"the vLLM server at {self.base_url} loads no adapters while it runs. Restart it with "
                "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` in its environment"
            )
        if response.status_code == 404:
            raise AdapterRefused(
                f"the vLLM server at {self.base_url} cannot read the adapter in {path}. Set an `output_dir` that both "
                "see under one path"
            )
        if response.status_code != 200:
            raise AdapterRefused(f"the vLLM server at {self.base_url} does not take the adapter: {response.text}")
        with self._lock:
            self._adapters[name] = path
            self.model = name
        self._unload_unnamed()

    def _post(self, url: str, **kwargs: Any) -> dict:
        named = (kwargs.get("json") or {}).get("model")
        with self._lock:
            self._in_flight[named] += 1
        try:
            return super()._post(url, **kwargs)
        finally:
            with self._lock:
                self._in_flight[named] -= 1
            self._unload_unnamed()

    def _unload_unnamed(self) -> None:
        """Unloads every adapter but the present one that no request in flight names."""
        with self._lock:
            idle = [name for name in self._adapters if name != self.model and not self._in_flight[name]]
            paths = [self._adapters.pop(name) for name in idle]
        for name, path in zip(idle, paths, strict=True):
            self._unload(name, path)

    def _unload(self, name: str, path: Path) -> None:
        import requests

        # A server that was started again has forgotten it, which is as well.
        requests.post(f"{self.base_url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=60)
        shutil.rmtree(path, ignore_errors=True)

    def _leave(self) -> None:
        """Leaves nothing behind, on the server or on the disk."""
        with contextlib.suppress(OSError):  # the server may be gone
            for name, path in self._adapters.items():
                self._unload(name, path)
        for path in self._adapters.values():
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):  # another adapter is in it
                path.parent.rmdir()
