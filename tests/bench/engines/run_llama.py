"""llama.cpp's server inside this process, asked over loopback by one thread a sequence."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import channel
import xllamacpp


def main() -> None:
    config = channel.config()
    server = xllamacpp.Server(parameters(config))
    address = server.listening_address
    askers = ThreadPoolExecutor(config["max_batch"])

    def ask(ids: list[int], num_tokens: int) -> list[int]:
        body = {
            "prompt": ids,
            "n_predict": num_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            tokens: list[int] = json.loads(response.read())["tokens"]
            return tokens

    def generate(ids: list[list[int]], num_tokens: int) -> list[list[int]]:
        return list(askers.map(ask, ids, [num_tokens] * len(ids)))

    channel.serve(generate)


def parameters(config: dict[str, Any]) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = config["model"]
    params.n_ctx = config["context"] * config["max_batch"]
    params.n_parallel = config["max_batch"]
    params.n_batch, params.n_ubatch = 2048, 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = config["threads"]
    params.n_threads_http = config["max_batch"] + 8
    params.cache_prompt, params.cache_ram_mib = False, 0
    if config["dtype"] == "float32":  # as it comes, attention is computed from float16
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = off
    params.verbosity = 1
    return params


if __name__ == "__main__":
    main()
