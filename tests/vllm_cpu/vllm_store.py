# Copyright 2026 The trl-dapo authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights from the trainer to vLLM's server over a TCP store: vLLM's own ways there are NCCL's and need a GPU.

The trainer and the server speak through vLLM's real endpoints and its real reloading of layers. What carries the
tensors is the only thing replaced. This module is loaded by the server (`--worker-extension-cls`) and by the trainer.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trl.generation.vllm_client import VLLMClient
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


HOST = "127.0.0.1"


@dataclass
class StoreInitInfo(WeightTransferInitInfo):
    port: int


@dataclass
class StoreUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]


class StoreEngine(WeightTransferEngine[StoreInitInfo, StoreUpdateInfo]):
    """The server's side: rank 1, which receives."""

    init_info_cls = StoreInitInfo
    update_info_cls = StoreUpdateInfo

    def init_transfer_engine(self, init_info):
        self.group = StatelessProcessGroup.create(HOST, init_info.port, rank=1, world_size=2)

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info):
        # The method of the base class waits for an accelerator, of which there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        self.model.load_weights((name, self.group.broadcast(None, src=0)) for name in update_info.names)

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)
        # vLLM packs every linear layer for the CPU, and reloading leaves a tied head packed as it was.
        head = self.model.lm_head
        head.quant_method.process_weights_after_loading(head)

    def shutdown(self):
        self.group = None


class Extension:
    """What `--worker-extension-cls` asks for; loading this module is all that is wanted."""


if "cpu_store" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("cpu_store", StoreEngine)


class StoreClient(VLLMClient):
    """The trainer's side: rank 0, which sends."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for adapter in self.session.adapters.values():
            # As many retries as TRL has, without the minute that its pauses take.
            adapter.max_retries = adapter.max_retries.new(backoff_factor=0)

    def init_communicator(self, device):
        with ThreadPoolExecutor(max_workers=1) as executor:  # either side waits for the other
            answer = executor.submit(
                self._post,
                f"{self.base_url}/init_weight_transfer_engine",
                json={"init_info": {"port": self.group_port}},
            )
            self.communicator = StatelessProcessGroup.create(HOST, self.group_port, rank=0, world_size=2)
            answer.result()

    def update_named_params(self, metadata, named_params):
        self._start_weight_update()
        for _, tensor in named_params:
            self.communicator.broadcast(tensor, src=0)
        names = [name for name, _, _ in metadata]
        self._post(f"{self.base_url}/update_weights", json={"update_info": {"names": names}})
        self._finish_weight_update()
