"""vLLM's V1 scheduler under measurement: the half of `bench.scheduler` that runs in vLLM's own interpreter.

Started as a script, isolated (`python -I`) so that nothing of this checkout shadows a package of vLLM's environment,
with an empty folder for a model's configuration. Its first line says which vLLM this is. Then it reads one JSON call a
line, `[handle, method, arguments]`, and answers with `{"result": ...}` or `{"error": ...}` until its input ends. The
methods do what those of `bench.schedulers.OurScheduler` do.
"""

import gc
import json
import os
import sys
import time
import tracemalloc
from typing import Any, TextIO

import numpy as np
import torch
from vllm import __version__  # type: ignore[import-not-found]
from vllm.config import (  # type: ignore[import-not-found]
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
from vllm.utils.hashing import get_hash_fn_by_name  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # type: ignore[import-not-found]
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # type: ignore[import-not-found]
from vllm.v1.request import Request, RequestStatus  # type: ignore[import-not-found]
from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found]

HEADS, HEAD_SIZE = 1, 64
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * HEAD_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": 32000,
    "max_position_embeddings": 1 << 20,
    "dtype": "bfloat16",
}


def vllm_config(model: str, shape: dict[str, int]) -> Any:
    """vLLM's defaults (prefix cache on, blocks hashed with SHA-256) but for the sizes."""
    return VllmConfig(
        model_config=ModelConfig(
            model=model, tokenizer=model, skip_tokenizer_init=True, max_model_len=shape["max_model_len"]
        ),
        cache_config=CacheConfig(block_size=shape["block_size"]),
        scheduler_config=SchedulerConfig(
            max_model_len=shape["max_model_len"],
            is_encoder_decoder=False,
            max_num_seqs=shape["running"],
            max_num_batched_tokens=shape["budget"],
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )


class VllmScheduler:
    """One scheduler with one group of full-attention layers, its requests, and the fake model."""

    def __init__(self, model: str, shape: dict[str, int]) -> None:
        config = vllm_config(model, shape)
        config.cache_config.num_gpu_blocks = shape["num_blocks"]
        spec = FullAttentionSpec(
            block_size=shape["block_size"], num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
        )
        kv_cache = KVCacheConfig(shape["num_blocks"], [], [KVCacheGroupSpec(["layer"], spec)])
        self._scheduler = Scheduler(config, kv_cache, StructuredOutputManager(config), shape["block_size"])
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(shape["block_size"], hash_function)
        self._tokens = np.random.default_rng(0)

    def add(self, requests: list[list[int]]) -> list[float]:
        costs = []
        for request_id, prompt_tokens, max_tokens in requests:
            prompt = np.random.default_rng(request_id).integers(1000, 20000, prompt_tokens).tolist()
            sampling = SamplingParams(max_tokens=max_tokens)
            began = time.perf_counter()
            request = Request(str(request_id), prompt, sampling, None, block_hasher=self._hasher)
            self._scheduler.add_request(request)
            costs.append(1e6 * (time.perf_counter() - began))
        return costs

    def run(self, rounds: list[list[list[int]]]) -> list[tuple[int, int, float, float, float]]:
        costs = []
        for arrivals in rounds:
            self.add(arrivals)
            costs.append(self._step())
        return costs

    def _step(self) -> tuple[int, int, float, float, float]:
        began = time.perf_counter()
        scheduled = self._scheduler.schedule()
        planned = time.perf_counter()
        result = self._fake_model(list(scheduled.num_scheduled_tokens))
        computed = time.perf_counter()
        self._scheduler.update_from_output(scheduled, result)
        settled = time.perf_counter()
        return 1, len(result.req_ids), 1e6 * (planned - began), 0.0, 1e6 * (settled - computed)

    def _fake_model(self, request_ids: list[str]) -> Any:
        tokens = self._tokens.integers(1000, 20000, (len(request_ids), 1)).tolist()
        return ModelRunnerOutput(request_ids, {name: index for index, name in enumerate(request_ids)}, tokens)

    def abort(self, request_ids: list[int]) -> list[float]:
        costs = []
        for name in map(str, request_ids):
            began = time.perf_counter()
            self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            costs.append(1e6 * (time.perf_counter() - began))
        return costs

    def num_unfinished(self) -> int:
        return int(self._scheduler.get_num_unfinished_requests())

    def bytes_each(self, requests: list[list[int]]) -> float:
        tracemalloc.start()
        self.add(requests)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held / len(requests)

    def settle_down(self) -> None:
        gc.collect()
        gc.freeze()


def serve(model: str, answers: TextIO) -> None:
    schedulers: dict[int, VllmScheduler] = {}
    for line in sys.stdin:
        handle, method, arguments = json.loads(line)
        result = None
        try:
            if method == "open":
                schedulers[handle] = VllmScheduler(model, *arguments)
            elif method == "close":
                del schedulers[handle]
                gc.unfreeze()
                gc.collect()
            else:
                result = getattr(schedulers[handle], method)(*arguments)
            answer = {"result": result}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    (model,) = sys.argv[1:]
    with open(os.path.join(model, "config.json"), "w") as file:
        json.dump(MODEL, file)
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # vLLM prints to stdout now and then
        print(json.dumps({"result": __version__}), file=answers, flush=True)
        serve(model, answers)


if __name__ == "__main__":
    main()
