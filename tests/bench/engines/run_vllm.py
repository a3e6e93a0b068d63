"""vLLM on a CPU, offline: eager, or compiled. Its attention needs values as wide as keys."""

import os

import channel


def main() -> None:
    config = channel.config()
    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[: config["threads"]])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(config["threads"])
    engine = LLM(
        model=config["model"],
        dtype=config["dtype"],
        enforce_eager=not config["compiled"],
        skip_tokenizer_init=True,
        max_model_len=config["context"],
        max_num_seqs=config["max_batch"],
        disable_log_stats=True,
        enable_prefix_caching=False,
    )

    def generate(ids: list[list[int]], num_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in ids]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    channel.serve(generate)


if __name__ == "__main__":
    main()
